"""`dadt compare`: checks whether two files hold the same weights, and shows where they differ most."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from dadt.errors import ConfigError
from dadt_cli.terminal import console
from dadt_cli.terminal.table import table

if TYPE_CHECKING:
    from dadt_cli.compare.difference import Difference
    from dadt_cli.compare.stored import WeightFile

SHOWN = 10
"""Most rows to print for each kind of value, unless --all is given."""
RESULTS = ("only in A", "only in B", "different", "equal")
PLURALS = {"parameter": "parameters", "buffer": "buffers", "optimizer": "optimizer values", "other": "other values"}
HEAD = ["NAME", "KIND", "TYPE", "DIFFERENCE", "RELATIVE", "ELEMENTS"]


@click.command(
    epilog="Exits with 0 if the two are equal, 1 if they differ, 2 if one of them cannot be read. Code in the files "
    "is never run."
)
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--tolerance", default=0.0, metavar="X", help="Largest difference between equal numbers.  [default: 0]")
@click.option("--ignore-dtype", is_flag=True, help="Compare the values of tensors, whatever their dtypes.")
@click.option("--all", "everything", is_flag=True, help="List every name, including equal ones.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(a: str, b: str, tolerance: float, ignore_dtype: bool, everything: bool, as_json: bool) -> int:
    """Compare the weights in A and B: torch.save or safetensors files, or FILE:PART, such as last.pt:model."""
    if not 0 <= tolerance < math.inf:
        raise ConfigError(f"--tolerance {tolerance:g}: give a number from 0")
    from dadt_cli.compare.memory import bounded
    from dadt_cli.compare.stored import path_of, read

    with bounded([path_of(a), path_of(b)]):
        found = Comparison(read(a), read(b), tolerance, ignore_dtype)
    if as_json:
        console.text(json.dumps(found.data(everything), indent=2), stdout=True)
    else:
        console.text("\n".join(found.lines(everything)), stdout=True)
    return 0 if found.equal else 1


@dataclass(frozen=True, slots=True)
class ComparedName:
    """The comparison of one name, which is in both files or in only one."""

    names: tuple[str, ...]
    """All names of the tensor, if both files use several names for one tensor."""
    kind: str
    difference: Difference
    sides: tuple[str | None, str | None]
    """Describes the value in each of the two files; None if the name is missing in a file."""

    @property
    def result(self) -> str:
        if None in self.sides:
            return "only in A" if self.sides[1] is None else "only in B"
        return "equal" if self.difference.equal else "different"


class Comparison:
    """The comparison of two files. Rows of each kind are sorted so that the largest differences come first."""

    def __init__(self, a: WeightFile, b: WeightFile, tolerance: float, ignore_dtype: bool) -> None:
        self.files = (a, b)
        self.tolerance = tolerance
        kinds = list(PLURALS)
        self.rows = sorted(
            _rows(a, b, tolerance, ignore_dtype),
            key=lambda row: (kinds.index(row.kind), RESULTS.index(row.result), -row.difference.weight),
        )
        self.equal = all(row.result == "equal" for row in self.rows)

    def lines(self, everything: bool) -> list[str]:
        a, b = self.files
        hint = self._hint()
        lines = [] if hint and not everything else self._table(everything)
        for kind, plural in PLURALS.items():
            if rows := [row for row in self.rows if row.kind == kind]:
                lines.append(f"{plural + ':':18}{_in_words(rows)}")
        return [*lines, *self._ties(), *hint, f"{a.name} and {b.name} {self._verdict()}"]

    def _table(self, everything: bool) -> list[str]:
        unlike = [row for row in self.rows if row.result != "equal"]
        few = [row for kind in PLURALS for row in [row for row in unlike if row.kind == kind][:SHOWN]]
        if not (listed := self.rows if everything else few):
            return []
        lines = [f"A: {self.files[0].name}", f"B: {self.files[1].name}", ""]
        lines += table(HEAD, list(map(_cells, listed)), left=["NAME", "KIND", "TYPE"])
        if left := len(unlike) - len(few) if not everything else 0:
            lines.append(f"and {left:,} more, which --all lists")
        return [*lines, ""]

    def _verdict(self) -> str:
        if not self.equal:
            return "differ"
        return f"are equal within {self.tolerance:g}" if self.tolerance else "are equal"

    def _ties(self) -> list[str]:
        """Describe tensors that have several names in one file but not in the other. Sharing a tensor is not counted as
        a difference of values."""
        one, other = ({frozenset(group) for group in stored.tied} for stored in self.files)
        pairs = (("A", one - other), ("B", other - one))
        return [
            f"one tensor in {side} alone: {', '.join(sorted(names))}"
            for side, groups in pairs
            for names in groups
            if all(names <= stored.values.keys() for stored in self.files)
        ]

    def _hint(self) -> list[str]:
        """If the two files have no name in common, suggest a part of one file whose names match the other file's;
        otherwise return an empty list."""
        a, b = self.files
        if a.values.keys() & b.values.keys():
            return []
        for side, one, other in (("B", a, b), ("A", b, a)):
            if start := _common_start(one.values.keys(), other.values.keys()):
                return [f"no name is in both; give {(other.whole + start).rstrip('/')} as {side}"]
        return []

    def data(self, everything: bool) -> dict[str, Any]:
        a, b = self.files
        kinds = {
            kind: dict(Counter(row.result for row in self.rows if row.kind == kind))
            for kind in PLURALS
            if any(row.kind == kind for row in self.rows)
        }
        rows = self.rows if everything else [row for row in self.rows if row.result != "equal"]
        return {
            "a": a.name,
            "b": b.name,
            "tolerance": self.tolerance,
            "equal": self.equal,
            "kinds": kinds,
            "rows": [_row_data(row) for row in rows],
            "tied": {"a": a.tied, "b": b.tied},
        }


def _rows(a: WeightFile, b: WeightFile, tolerance: float, ignore_dtype: bool) -> Iterator[ComparedName]:
    from dadt_cli.compare.difference import Difference, describe, difference

    tied = {names for names in map(frozenset, a.tied) if names in set(map(frozenset, b.tied))}
    groups = {name: tuple(n for n in a.values if n in names) for names in tied for name in names}
    for name in dict.fromkeys([*a.values, *b.values]):
        names = groups.get(name, (name,))
        if name != names[0]:
            continue
        if name not in b.values:
            yield ComparedName(names, a.kinds[name], Difference(), (describe(a.values[name]), None))
        elif name not in a.values:
            yield ComparedName(names, b.kinds[name], Difference(), (None, describe(b.values[name])))
        else:
            one, other = a.values[name], b.values[name]
            try:
                found = difference(one, other, tolerance, ignore_dtype)
            except ConfigError as error:
                raise ConfigError(f"{a.name} and {b.name}: {name}: {error}") from error
            yield ComparedName(names, a.kinds[name], found, (describe(one), describe(other)))


def _cells(row: ComparedName) -> list[str]:
    one, other = row.sides
    kind = one if one == other or other is None else other if one is None else f"{one} -> {other}"
    name = " = ".join(row.names)
    difference = row.difference
    if row.result.startswith("only"):
        return [name, row.kind, kind or "", row.result, "", ""]
    largest = "" if difference.what in ("type", "shape", "value") else f"{difference.largest:.3g}"
    text = ", ".join(filter(None, [difference.what, largest]))
    relative = "" if difference.relative is None else f"{difference.relative:.1e}"
    count = f"{difference.count:,} of {difference.elements:,}" if difference.elements > 1 and difference.count else ""
    return [name, row.kind, kind or "", text, relative, count]


def _in_words(rows: Sequence[ComparedName]) -> str:
    counts = Counter(row.result for row in rows)
    unlike = counts["different"]
    compared = unlike + counts["equal"]
    parts = [f"{unlike:,} of {compared:,} differ" if unlike else f"all {compared:,} equal"] if compared else []
    gaps = [row.difference.largest for row in rows if row.difference.largest or math.isnan(row.difference.largest)]
    if gaps:
        most = math.nan if any(map(math.isnan, gaps)) else max(gaps)
        parts[0] += f"{', by' if unlike else ''} up to {most:.3g}"
    parts += [f"{counts[where]:,} {where}" for where in ("only in A", "only in B") if counts[where]]
    return "; ".join(parts)


def _row_data(row: ComparedName) -> dict[str, Any]:
    one, other = row.sides
    difference = row.difference
    data: dict[str, Any] = {"names": row.names, "kind": row.kind, "result": row.result, "a": one, "b": other}
    if None in row.sides:
        return data
    largest = difference.largest
    return {
        **data,
        "what": difference.what or None,
        "difference": largest if math.isfinite(largest) else str(largest),
        "relative": difference.relative,
        "count": difference.count,
        "elements": difference.elements,
    }


def _common_start(names: Set[str], longer: Set[str]) -> str:
    """Return the prefix, such as model/ or module., whose removal from `longer` yields the most names in `names`; empty
    if there is none."""
    starts: Counter[str] = Counter()
    for name in longer:
        cuts = (index + 1 for index, letter in enumerate(name) if letter in "/.")
        starts.update(name[:cut] for cut in cuts if name[cut:] in names)
    return starts.most_common(1)[0][0] if starts else ""
