"""Writes tables of paired differences with intervals, and pictures of loss against steps, from the file of results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from benchmarks.convergence.family import FAMILIES
from benchmarks.convergence.interval import MeanInterval, interval, shown
from benchmarks.convergence.simulator import EVERY
from benchmarks.convergence.study import SWEEP_SEEDS, Results, load, score
from benchmarks.page import put
from benchmarks.page import table as markdown
from benchmarks.picture import panels as panels_of
from dadt_cli.bench.figure import as_csv

SHOWN = (
    *("pipe", "gossip", "local", "local-32", "diloco-0.5"),
    *("bf16", "fp16", "int8", "int4", "sync-int4", "powersgd"),
    *("momentum:1", "momentum:2", "sync-momentum:1", "sync-momentum:2", "local-6-int4-at-once"),
    *("real-plain", "real-pipe"),
)
"""Methods that have rows on the page; the CSV file has all."""
WIDE = {"linewidth": 5, "alpha": 0.35}
"""Style of a curve that other curves may cover."""
COLORS = {"sync": "#1f3b57", "plain": "#c8553d", "pipe": "#2a9d8f"}
OTHER_COLORS = {
    "sync": "#1f3b57",
    "pipe": "#2a9d8f",
    "gossip": "#c8553d",
    "local": "#e9b44c",
    "diloco": "#7b4b94",
    "bf16": "#8fa3b5",
    "int8": "#5a5a5a",
    "powersgd": "#b07a5b",
}
LOOSE = (
    *("gossip", "gossip-sqrt", "local", "local-32", "local-sqrt", "diloco", "diloco-8", "diloco-0.5"),
    *("local-int4", "local-6-int4-at-once"),
)
ONE_BIT = {"sync-momentum:1": 0.015, "momentum:1": 0.02}
"""Loss that the GPT may end above `sync` with one bit for each value, in step and late."""
AVERAGED = ", averaged"
"""Suffix for the mean of the ranks' weights, in place of each rank's own weights."""
EXACT = ("bf16", "fp16", "int8")
"""Methods that may lose nothing beyond noise against `pipe` without compression: both intervals must contain 0."""

Key = tuple[str, float, int, str]
"""Key of a group of trainings: family, learning rate, number of workers, method."""
Outcomes = dict[int, dict[str, Any]]
"""Outcomes of all trainings of one method, by seed."""


class StudyRow(NamedTuple):
    family: str
    rate: float
    ranks: int
    method: str
    outcomes: Outcomes
    lost: MeanInterval | None
    """Accuracy lost against another method with the same seeds; None if there is nothing to compare with."""
    added: MeanInterval | None
    """Loss added against the same other method; None if there is nothing to compare with."""

    @property
    def met(self) -> str:
        if self.lost is None or self.added is None or self.lost.pairs < 2:
            return ""
        judged = self.lost if FAMILIES[self.family].counts else self.added
        good = judged.high <= allowed(self.family, self.method)
        if self.method in EXACT:
            good = self.lost.low <= 0 and self.added.low <= 0
        return "yes" if good else "no"

    @property
    def diverged(self) -> int:
        """Number of trainings that ended no better than chance."""
        chance = 0.2 if FAMILIES[self.family].counts else -math.log(65)
        return sum(goodness(self.family, outcome) <= chance for outcome in self.outcomes.values())


def goodness(family: str, outcome: dict[str, Any]) -> float:
    return score(family, outcome) * (1 if FAMILIES[family].counts else -1)


def allowed(family: str, method: str) -> float:
    """Return the accuracy that may be lost, or the loss that may be added, at the bad end of the interval."""
    if method in EXACT:
        return 0.0
    if FAMILIES[family].counts:
        return 0.005 if method.removesuffix(AVERAGED) in LOOSE else 0.003
    return 0.03 if method.removesuffix(AVERAGED) in LOOSE else ONE_BIT.get(method, 0.01)


def against(method: str) -> str:
    """Return the method with which this method is compared."""
    return "pipe" if method in EXACT else "sync"


def groups(results: Results) -> dict[Key, Outcomes]:
    """Return all trainings except those of the sweep."""
    found: dict[Key, Outcomes] = {}
    for run, outcome in sorted(results.items(), key=lambda item: item[0]):
        if run.seed not in SWEEP_SEEDS:
            found.setdefault((run.family, run.rate, run.ranks, run.method), {})[run.seed] = outcome
            if run.method in LOOSE and "averaged" in outcome:
                key = (run.family, run.rate, run.ranks, f"{run.method}{AVERAGED}")
                found.setdefault(key, {})[run.seed] = outcome["averaged"]
    return found


def rows(results: Results) -> Iterator[StudyRow]:
    found = groups(results)
    for key in sorted(found, key=lambda key: (key[0], key[2], key[1], key[3])):
        family, rate, ranks, method = key
        others = found.get((family, rate, ranks, against(method)), {}) if method != "sync" else {}
        paired = [(outcome, others[seed]) for seed, outcome in found[key].items() if seed in others]
        lost = difference([other["accuracy"] - outcome["accuracy"] for outcome, other in paired])
        added = difference([outcome["loss"] - other["loss"] for outcome, other in paired])
        yield StudyRow(*key, found[key], lost, added)


def difference(values: Sequence[float]) -> MeanInterval | None:
    return interval(values) if values and all(map(math.isfinite, values)) else None


def table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return the head and the lines of the table of all trainings."""
    head = [
        *("family", "rate", "workers", "method", "accuracy", "loss", "seeds", "against"),
        *("accuracy lost (95 %)", "loss added (95 %)", "target", "met", "diverged"),
    ]
    lines = []
    for row in rows(results):
        compared = row.lost is not None or row.added is not None
        accuracy, loss = (statistics.fmean(o[key] for o in row.outcomes.values()) for key in ("accuracy", "loss"))
        cells = [
            *(row.family, f"{row.rate:g}", row.ranks, row.method, f"{accuracy:.4f}", f"{loss:.4f}", len(row.outcomes)),
            against(row.method) if compared else "",
            *("" if each is None else shown(each) for each in (row.lost, row.added)),
            *(f"{allowed(row.family, row.method):g}" if compared else "", row.met, row.diverged),
        ]
        lines.append(list(map(str, cells)))
    return head, lines


def chance(results: Results) -> str:
    """Return a table that compares `sync` with itself at the smallest number of workers: only the order of summation
    differs."""
    lines = []
    scores = {
        key[:3]: {seed: goodness(key[0], outcome) for seed, outcome in outcomes.items()}
        for key, outcomes in groups(results).items()
        if key[3] == "sync"
    }
    for (family, rate, ranks), by_seed in sorted(scores.items()):
        fewest = min(r for f, at, r in scores if (f, at) == (family, rate))
        first = scores[family, rate, fewest]
        above = [first[seed] - value for seed, value in by_seed.items() if seed in first]
        if ranks == fewest or len(above) < 2 or normalizes(family):
            continue
        found = interval(above)
        lines.append([family, f"{rate:g}", f"{ranks} against {fewest}", found.pairs, shown(found)])
    return markdown(["family", "rate", "workers", "seeds", "`sync` above itself (95 %)"], lines)


def normalizes(family: str) -> bool:
    """Return whether the model has BatchNorm, with which the number of ranks changes the training, since each rank
    normalizes its own part."""
    return any(isinstance(module, nn.BatchNorm2d) for module in FAMILIES[family].begin(0, 1.0)[0].modules())


def sweeps(results: Results) -> str:
    """Return a table of the results of `sync` at each learning rate."""
    lines = []
    for family in FAMILIES.values():
        for rate in family.rates:
            found = [
                score(family.name, outcome)
                for run, outcome in results.items()
                if run.seed in SWEEP_SEEDS and (run.family, run.rate, run.method) == (family.name, rate, "sync")
            ]
            if len(found) == len(SWEEP_SEEDS):
                lines.append([family.name, f"{rate:g}", f"{statistics.fmean(found):.4f}"])
    return markdown(["family", "rate", "sync"], lines)


class Panel(NamedTuple):
    ranks: int
    rate: float
    colors: dict[str, str]


def panels(family: str, found: dict[Key, Outcomes]) -> Iterator[Panel]:
    """Yield each learning rate at which `sync` has others beside it, with the smallest number of workers, and the
    methods that real workers train by."""
    here = [(rate, ranks, method) for name, rate, ranks, method in found if name == family]
    simulated = [(rate, ranks) for rate, ranks, method in here if method in COLORS and method != "sync"]
    for rate in sorted({rate for rate, _ in simulated}):
        yield Panel(min(ranks for at, ranks in simulated if at == rate), rate, COLORS)
    for rate, ranks in sorted({(rate, ranks) for rate, ranks, method in here if method == "gossip"}):
        yield Panel(ranks, rate, OTHER_COLORS)


def picture(family: str, results: Results, path: Path) -> bool:
    """Draw training loss against steps, as the mean over seeds; if there are few methods, with a band from the least to
    the largest loss. Returns False if there is nothing to show."""
    found = groups(results)
    all_panels = list(panels(family, found))
    if not all_panels:
        return False
    with panels_of(path, (3.3 * len(all_panels), 4.4), len(all_panels), dpi=160) as axes:
        for axis, (ranks, rate, colors) in zip(axes, all_panels, strict=True):
            for method, color in colors.items():
                outcomes = found.get((family, rate, ranks, method), {})
                draw(axis, list(outcomes.values()), method, color, band=len(colors) < 5)
            axis.set(title=f"{family}, {ranks} workers, rate {rate:g}", xlabel="step")
            axis.grid(axis="y", alpha=0.3)
            axis.set_yscale("log" if FAMILIES[family].counts else "linear")
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18)}
            columns = 1 if len(colors) < 5 else 2
            axis.legend(frameon=False, fontsize="small", ncols=columns, columnspacing=1.0, **below)
        axes[0].set_ylabel("training loss")
    return True


def draw(axis: Any, outcomes: Sequence[dict[str, Any]], method: str, color: str, *, band: bool) -> None:
    curves = [outcome["curve"] for outcome in outcomes]
    if not curves:
        return
    points = list(zip(*curves, strict=True))
    steps = [EVERY * (i + 0.5) for i in range(len(points))]
    if band:
        axis.fill_between(steps, list(map(min, points)), list(map(max, points)), color=color, alpha=0.15, linewidth=0)
    style = WIDE if method == "sync" else {}
    label = f"{method} ({len(curves)} seeds)"
    axis.plot(steps, list(map(statistics.fmean, points)), color=color, label=label, **style)


def write(path: Path, page: Path | None) -> None:
    """Print the tables, write the table of all trainings as CSV beside the results, put the other tables and the rows
    of SHOWN into the page, and draw the pictures."""
    results = load(path)
    head, lines = table(results)
    print(markdown(head, lines))
    path.with_suffix(".csv").write_text(as_csv([dict(zip(head, line, strict=True)) for line in lines]))
    if page is not None:
        few = [line for line in lines if line[head.index("method")] in SHOWN]
        put(page, "trainings", "\n".join([sweeps(results), chance(results), markdown(head, few)]))
    for family in FAMILIES:
        picture(family, results, path.with_name(f"{path.stem}-{family}.png"))
