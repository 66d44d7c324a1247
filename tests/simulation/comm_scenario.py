"""What a seed decides of ranks that exchange named tensors: how many they are, what they submit, what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from simulation.comm_faults import NamedFault, draw_fault

DTYPES = ("float32", "int64", "uint8")


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """One named tensor, as a rank submits it."""

    name: str
    kind: str = "allreduce"
    count: int = 4
    dtype: str = "float32"
    reduction: str = "sum"
    root: int = 0
    group: str = ""
    group_size: int = 0

    @property
    def signature(self) -> str:
        if self.kind == "allreduce":
            return f"all_reduce {self.reduction} {self.dtype} [{self.count}]"
        return f"{self.kind} from {self.root} {self.dtype} [{self.count}]"


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """Ranks that exchange named tensors, and what goes wrong."""

    seed: int
    size: int
    latency: float
    rounds: tuple[tuple[NamedTensor, ...], ...]
    """What each rank submits, in an order of its own."""
    overlap: bool
    """Whether a rank submits the tensors of a round before it waits for those of the last one."""
    tolerant: bool
    """Whether the script goes on after a mismatch."""
    cycle: float
    buffer_bytes: int
    cache: int
    stall_warning: float
    on_stall: str
    timeout: float
    step_seconds: float
    joins: dict[int, int] = field(default_factory=dict)
    """Rank to the round at which its data end before the others'. If there are any, all ranks join at their end."""
    faults: tuple[NamedFault, ...] = ()

    @property
    def limit(self) -> float:
        """Seconds within which all ranks have to end."""
        rounds = len(self.rounds) * (4 * self.step_seconds + 0.2 + 0.1 * self.size)
        lasting = sum(fault.seconds for fault in self.faults)
        return rounds + (1 + len(self.faults)) * (2 * self.timeout + 10.0) + lasting

    def lines(self) -> list[str]:
        told = [
            f"{self.size} ranks; {self.overlap=} {self.tolerant=} {self.cycle=} {self.buffer_bytes=} {self.cache=}",
            f"{self.stall_warning=} {self.on_stall=} {self.timeout=} {self.joins=}",
        ]
        told += [f"round {number}: {', '.join(map(str, each))}" for number, each in enumerate(self.rounds)]
        return told + [f"fault: {fault}" for fault in self.faults]


def draw_tensors(seed: int) -> NamedTensors:
    random = Random(seed)
    size = random.choices([2, 3, 4, 5, 8, 16, 64], [10, 8, 8, 4, 3, 1, 0.1])[0]
    overlap = random.random() < 0.4
    kinds = [random.choices(["allreduce", "broadcast", "exchange"], [8, 1, 1])[0] for _ in range(12)]
    pool = [
        NamedTensor(
            f"t{i}", kind, random.choice([1, 4, 300]), random.choice(DTYPES), random.choice(["sum", "mean", "max"])
        )
        for i, kind in enumerate(kinds)
    ]
    count = random.randint(1, 6 if size < 16 else 3)
    rounds = tuple(_round(random, pool, number, overlap=overlap) for number in range(count))
    joins = {}
    if random.random() < 0.15:
        joins = {rank: random.randrange(count) for rank in random.sample(range(size), random.randint(1, size - 1))}
    step = random.choice([0.01, 0.1, 1.0])
    span = 1.2 * count * step + 0.2
    number = random.choices(range(5), [3, 5, 4, 2, 1])[0]
    ats = sorted(random.uniform(0.0, span) for _ in range(number))
    return NamedTensors(
        seed,
        size,
        random.choice([0.0002, 0.005, 0.05]),
        rounds,
        overlap,
        tolerant=random.random() < 0.7,
        cycle=random.choice([0.001, 0.01, 1.0]),
        buffer_bytes=random.choice([0, 64, 2000, 1 << 26]),
        cache=random.choice([1, 4, 4096]),
        stall_warning=random.choice([2.0, 5.0]),
        on_stall=random.choice(["warn", "warn", "dump", "abort"]),
        timeout=random.choice([8.0, 20.0]),
        step_seconds=step,
        joins=joins,
        faults=tuple(draw_fault(random, at, size, count) for at in ats),
    )


def _round(random: Random, pool: list[NamedTensor], number: int, *, overlap: bool) -> tuple[NamedTensor, ...]:
    """The tensors of one round. Those of rounds that overlap have other names."""
    some = random.sample(pool, random.randint(1, 8))
    mark = "ab"[number % 2] if overlap else ""
    grouped = random.randint(2, len(some)) if len(some) > 1 and random.random() < 0.3 else 0
    group = random.choice(["g", "h"]) + mark
    return tuple(
        NamedTensor(
            each.name + mark,
            each.kind,
            each.count,
            each.dtype,
            each.reduction,
            each.root,
            group if place < grouped else "",
            grouped if place < grouped else 0,
        )
        for place, each in enumerate(some)
    )
