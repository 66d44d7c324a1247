"""Chooses the contenders of a measurement, from a sweep over settings and the peers to compare with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from dadt.config import Config
from dadt.config.check import flag
from dadt.config.config import parse
from dadt.errors import ConfigError
from dadt_cli.bench.place import WHERE
from dadt_cli.bench.training import Contender, alone, copies, limit

OWN = ("batch", "np")
"""Keys of --sweep that are not settings of `dadt run`: batch size of each worker, and number of workers."""


@dataclass(frozen=True, slots=True)
class ContenderGroup:
    """Contenders that are measured together in turn, with one number of workers and one batch size."""

    ranks: int
    batch_size: int
    contenders: list[Contender] = field(default_factory=list)


def parse_sweep(text: str) -> dict[str, list[str]]:
    """Parse a sweep such as `executor=shm,gloo,batch=8,32` into keys with their values: a part without `=` is a further
    value of the preceding key.

    Raises ConfigError for an unknown setting or a value that the setting does not accept.
    """
    found: dict[str, list[str]] = {}
    values: list[str] | None = None
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if equals:
            values = found.setdefault(key.strip().replace("-", "_"), [])
        if values is None or not (value if equals else key):
            raise ConfigError(f"--sweep {text}: give settings with their values, as executor=shm,gloo,batch=8,32")
        values.append(value if equals else key)
    knobs = {f.name for f in fields(Config) if not f.metadata["launch"]} - {"batch", *WHERE}
    for key, each in found.items():
        if key not in knobs | set(OWN):
            raise ConfigError(f"--sweep {text}: there is no {key}; sweep over {', '.join(OWN)} or settings of dadt run")
        for value in each:
            if key in OWN and not (value.isdigit() and int(value) > 0):
                raise ConfigError(f"--sweep {key}={value}: give whole numbers above 0")
            if key in knobs:
                Config(**{key: parse(key, value)})
    return found


def blocks(
    config: Config, base: Sequence[str], sweep: dict[str, list[str]], peers: Sequence[str], ranks: int, batch_size: int
) -> list[ContenderGroup]:
    """Return one group of contenders for each number of workers and batch size of the sweep. base: options of `dadt
    run` for all of DADT's contenders, equal to those in `config`."""
    swept = {key: values for key, values in sweep.items() if key not in OWN}
    made = []
    for np, batch in itertools.product(sweep.get("np", [str(ranks)]), sweep.get("batch", [str(batch_size)])):
        block = ContenderGroup(int(np), int(batch))
        own = [
            _contender(config, base, dict(zip(swept, values, strict=True)), block.ranks)
            for values in itertools.product(*swept.values())
        ]
        block.contenders.append(alone())
        if block.ranks > 1:
            block.contenders.extend([copies(block.ranks), limit(own[0].options, block.ranks)])
        block.contenders.extend(c for c in own if "null" not in c.options or block.ranks == 1)
        names = {c.name for c in block.contenders}
        block.contenders.extend(_peer(p, base, block.ranks) for p in peers if block.ranks > 1 and p not in names)
        made.append(block)
    return made


def _contender(config: Config, base: Sequence[str], values: dict[str, str], ranks: int) -> Contender:
    options = [*base, *itertools.chain(*((flag(key), value) for key, value in values.items()))]
    return Contender(" ".join(values.values()) or config.algorithm, ranks, tuple(options))


def _peer(peer: str, base: Sequence[str], ranks: int) -> Contender:
    if peer == "sync":
        return Contender("sync", ranks, (*base, "--algorithm", "sync"))
    return Contender(peer, ranks, peer=peer)
