"""Measures how fast contenders train the same model. The workers of all contenders run at the same time but train in
turn, so that the machine's load affects all contenders equally."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

import psutil

from dadt.config import Config
from dadt.config.check import round_steps
from dadt.errors import ConfigError
from dadt_cli.bench.line import Hello, Worked
from dadt_cli.bench.party import Location, Party, start
from dadt_cli.bench.ratio import Interval, interval, ratio
from dadt_cli.terminal.table import duration

LEAST_ROUNDS = 6
"""Minimum number of rounds, even if the time limit has passed: fewer rounds give no 95 % interval."""
LEAD = 1
"""Number of steps at the start of each turn that are not counted, since an exchange from before the pause between turns
finishes in them."""
WARMUP = 6
WARMUP_STEPS = {"auto": 10}
"""Values of --warmup-steps by algorithm or compression, where they differ from 2, the usual value."""
BEGINNING = 60
"""Number of steps after which momentum is sent in few bits, at the latest, and `auto` has looked at its first steps."""
MOST = 16
"""Maximum number of contenders, since the workers of all contenders are in memory at the same time."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to train: `dadt run` with these options, or the script without DADT."""

    name: str
    ranks: int
    options: tuple[str, ...] = ()
    peer: str = ""
    """Name from PEERS of the library that averages in place of DADT; empty for DADT's own contenders, and for plain
    ones."""
    plain: bool = False
    """Whether the script trains with neither DADT nor a peer."""

    @property
    def injected(self) -> bool:
        return not self.peer and not self.plain

    @property
    def warmup(self) -> int:
        """Number of synchronous steps with which this contender's training begins."""
        return max(WARMUP_STEPS.get(self._chosen(option, ""), 2) for option in ("--algorithm", "--compression"))

    @property
    def settling(self) -> int:
        """Number of steps that are not counted, after which this contender trains as it does to its end."""
        begins = self.injected and self._chosen("--compression", "").startswith(("momentum", "auto"))
        return BEGINNING if begins else self.warmup + WARMUP - 1

    @property
    def period(self) -> int:
        """Number of steps within which this contender exchanges at least once."""
        local = self.injected and self._chosen("--algorithm", "") == "local"
        return round_steps(self._chosen("--sync-every", Config().sync_every)) if local else 1

    def _chosen(self, option: str, default: str) -> str:
        """Return the value of an option of this contender; the last one if it is set several times, or the default."""
        pairs = [value for name, value in zip(self.options, self.options[1:], strict=False) if name == option]
        return pairs[-1] if pairs else default


@dataclass(frozen=True, slots=True)
class Task:
    """The task that every worker trains: model, batches, device and precision."""

    model: str = "mlp"
    batch_size: int = 8
    """Samples of each backward pass, on each worker."""
    device: str = "auto"
    precision: str = "fp32"
    data: str = ""
    accumulate: int = 1
    """Number of backward passes in a step."""
    optimizer: str = "sgd"
    """"sgd" with momentum, or "adam"."""


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """The figures of one contender, with their intervals over all rounds."""

    name: str
    ranks: int
    batch_size: int
    options: Sequence[str]
    seconds: Interval
    """Seconds of a step on the slowest rank."""
    rate: Interval
    """Units (such as images or tokens) per second of all ranks together."""
    rates: list[Interval]
    """Units (such as images or tokens) per second of each rank, ordered by rank."""
    efficiency: Interval | None
    """Rate of all ranks divided by the rate of equally many copies of the script that exchange nothing; None if such
    copies were not measured."""
    exposed: Interval | None
    """Share of a step's time that is added by communication that computing does not hide: the difference to a step with
    the null executor, which transfers nothing."""
    speed: Interval
    """Rate divided by the rate of the reference contender, which is the first of DADT's contenders that does not use
    the null executor."""
    memory: int
    """Peak bytes in use on the rank that uses the most: of the GPU, or of the process."""
    beyond: Interval | None
    """Processor seconds of a step beyond those of the copies that exchange nothing, in the same round, on the rank that
    needs the most; None if such copies were not measured."""
    transport: Interval | None
    """Processor seconds of a step in threads that move data between ranks, on the rank that needs the most; None if
    there are no such threads."""
    own: float
    """Share of its training time that rank 0 spends in DADT's hooks around steps, including waits for other ranks."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of contenders measured in turn, with the same batch size and, except for the single worker, the same
    number of ranks."""

    hello: Hello
    rows: list[TrainingRow]
    turns: list[list[float]] = field(default_factory=list)
    """For each row, the seconds of a step in every round."""
    cpu: list[list[float]] = field(default_factory=list)
    """For each row, the processor seconds of a step in every round, on the rank that needs the most."""
    transport: list[list[float]] = field(default_factory=list)
    """For each row, the processor seconds of a step that threads spend on moving data between ranks, in every round;
    empty for a row without such threads."""


Progress = Callable[[str], None]
"""Called before each start or measurement with a text that describes it."""


def alone() -> Contender:
    """Return the contender that trains the script without DADT in a single process."""
    return Contender("1 worker", 1, plain=True)


def copies(ranks: int, options: tuple[str, ...] = ()) -> Contender:
    """Return the contender that runs `ranks` copies of the script at once, which share cores, caches and memory but
    exchange nothing. Scaling efficiency is relative to these copies."""
    return Contender("plain", ranks, options, plain=True)


def limit(options: Sequence[str], ranks: int) -> Contender:
    """Return a contender with these options but the null executor, which transfers nothing: the limit that faster
    communication could reach."""
    return Contender("null (limit)", ranks, (*options, "--executor", "null"))


def measure(
    contenders: Sequence[Contender],
    task: Task,
    location: Location | None = None,
    *,
    steps: int,
    rounds: int,
    seconds: float = math.inf,
    progress: Progress = lambda what: None,
) -> Measured:
    """Measure all contenders: in each round every contender trains `steps` counted steps, in an order that is reversed
    each round. Rounds end before `seconds` would be exceeded, but not before LEAST_ROUNDS.

    Raises ConfigError for what cannot be measured, DadtError if a contender fails.
    """
    check(contenders, steps, rounds)
    begun = time.monotonic()
    with ExitStack() as stack:
        location, threads, guess = location or Location(), 0, 0.0
        # Contenders with the most ranks start first, since their workers determine the number of threads that a single
        # worker gets. DADT's contenders start before plain ones, because the memory of the first contender is the
        # estimate for all others.
        order = sorted(range(len(contenders)), key=lambda i: (-contenders[i].ranks, contenders[i].plain))
        started: dict[int, Party] = {}
        for at, i in enumerate(order):
            progress(f"{contenders[i].name} starts")
            started[i] = party = _start(stack, contenders[i], task, location, threads)
            threads = threads or party.hellos[0].threads
            progress(f"{contenders[i].name} warms up")
            worked = party.train(contenders[i].warmup + WARMUP - 1, 1)
            guess += (LEAD + steps) * max(each.seconds for each in worked)
            if party.hellos[0].device == "cpu" and not location.remote:
                _check_memory(worked, sum(contenders[j].ranks for j in order[at + 1 :]))
        parties = [started[i] for i in range(len(contenders))]
        turns: list[list[list[Worked]]] = [[] for _ in contenders]
        first = time.monotonic()
        for turn in range(rounds):
            now = time.monotonic()
            mean = (now - first) / turn if turn else guess
            if turn >= LEAST_ROUNDS and now + mean > begun + seconds:
                break
            left = min((rounds - turn) * mean, max(begun + seconds - now, (LEAST_ROUNDS - turn) * mean))
            progress(f"round {turn + 1} of {rounds}, {duration(left)} left")
            for i in range(len(contenders)) if turn % 2 == 0 else reversed(range(len(contenders))):
                turns[i].append(parties[i].train(LEAD, steps))
        hello = parties[0].hellos[0]
    made = rows(contenders, task, hello, turns, steps)
    series = ([take(each, steps) for each in turns] for take in (_slowest, _processor, _transport))
    return Measured(hello, made, *series)


def check(contenders: Sequence[Contender], steps: int, rounds: int) -> None:
    if rounds < 2:
        raise ConfigError(f"--rounds {rounds}: an interval needs 2 rounds or more, and one of 95 % needs 6")
    if steps < 1:
        raise ConfigError(f"--steps {steps}: must be 1 or more")
    for contender in contenders:
        period = contender.period
        if steps < period:
            raise ConfigError(f"--steps {steps}: `local` averages every {period} steps, give as many or more")
    if len(contenders) > MOST:
        raise ConfigError(f"{len(contenders)} contenders are up at once; {MOST} are the most: sweep over fewer values")


def _check_memory(worked: Sequence[Worked], more: int) -> None:
    """Raise ConfigError if `more` further workers would not fit in memory: a machine without free memory hangs for
    minutes before the kernel ends a process."""
    need, free = more * max(each.memory for each in worked), psutil.virtual_memory().available
    if need > free:
        raise ConfigError(
            f"all contenders are up at once: {more} workers more need about {need / 1e9:.1f} GB of memory, and"
            f" {free / 1e9:.1f} GB are free -> a smaller --batch-size, fewer workers (-np), peers or values of --sweep"
        )


def rows(
    contenders: Sequence[Contender], task: Task, hello: Hello, turns: Sequence[Sequence[list[Worked]]], steps: int
) -> list[TrainingRow]:
    units = task.batch_size * task.accumulate * hello.per_sample
    seconds = [_slowest(each, steps) for each in turns]
    rates = [[c.ranks * units / s for s in each] for c, each in zip(contenders, seconds, strict=True)]
    plain = {c.ranks: rates[i] for i, c in enumerate(contenders) if c.plain}
    cpu = [_processor(each, steps) for each in turns]
    idle = {c.ranks: cpu[i] for i, c in enumerate(contenders) if c.plain}
    moving = [_transport(each, steps) for each in turns]
    null = next((i for i, c in enumerate(contenders) if "null" in c.options), None)
    first = next((i for i, c in enumerate(contenders) if c.injected and i != null), 0)
    return [
        TrainingRow(
            name=c.name,
            ranks=c.ranks,
            batch_size=task.batch_size,
            options=c.options,
            seconds=interval(seconds[i]),
            rate=interval(rates[i]),
            rates=[interval([steps * units / w[rank].seconds for w in turns[i]]) for rank in range(c.ranks)],
            efficiency=None if c.plain or c.ranks not in plain else ratio(rates[i], plain[c.ranks]),
            exposed=None
            if null in (None, i) or c.plain or c.ranks == 1
            else interval([1.0 - low / s for low, s in zip(seconds[null], seconds[i], strict=True)]),
            speed=ratio(rates[i], rates[first]),
            memory=max(w.memory for w in turns[i][-1]),
            beyond=None
            if c.plain or c.ranks == 1 or c.ranks not in idle
            else interval([more - less for more, less in zip(cpu[i], idle[c.ranks], strict=True)]),
            transport=interval(moving[i]) if moving[i] else None,
            own=sum(t[0].own for t in turns[i]) / sum(t[0].seconds for t in turns[i]),
        )
        for i, c in enumerate(contenders)
    ]


def _slowest(turns: Sequence[Sequence[Worked]], steps: int) -> list[float]:
    """Return the seconds of a step on the slowest rank, by round."""
    return [max(worked.seconds for worked in turn) / steps for turn in turns]


def _processor(turns: Sequence[Sequence[Worked]], steps: int) -> list[float]:
    """Return the processor seconds of a step on the rank that needs the most, by round."""
    return [max(worked.cpu for worked in turn) / steps for turn in turns]


def _transport(turns: Sequence[Sequence[Worked]], steps: int) -> list[float]:
    """Return the processor seconds of a step in threads that move data, on the rank that needs the most, by round;
    empty if there are no such threads."""
    known = [[worked.transport for worked in turn if worked.transport is not None] for turn in turns]
    return [max(each) / steps for each in known] if all(known) else []


def _start(stack: ExitStack, contender: Contender, task: Task, location: Location, threads: int) -> Party:
    """Start a contender's workers. threads: number of threads of each worker; 0 lets the launcher decide."""
    options = [*contender.options]
    options += ["--warmup-steps", str(contender.warmup)] if contender.injected else ["--inject", "none"]
    if threads:
        options += ["-x", f"OMP_NUM_THREADS={threads}"]
    script = flags_of({"name": contender.name, **asdict(task), "peer": contender.peer})
    return stack.enter_context(start(contender.name, location, contender.ranks, options, script))


def flags_of(values: Mapping[str, object]) -> list[str]:
    """Return the arguments of the trainer's command line that pass these names and values."""
    return [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]
