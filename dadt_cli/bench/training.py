"""How fast contenders train the same model: all are up at once and train in turn, so that all see the same machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

import psutil

from dadt.config import Config
from dadt.errors import ConfigError
from dadt_cli.bench.line import Hello, Worked
from dadt_cli.bench.party import Location, Party, start
from dadt_cli.bench.ratio import Interval, interval, ratio
from dadt_cli.terminal.table import duration

LEAST_ROUNDS = 6
"""Rounds that are made even if the time for them is over: fewer have no interval of 95 %."""
LEAD = 1
"""Steps before those that are counted in each turn: an exchange that was launched before the pause is used up."""
WARMUP = 6
WARMUP_STEPS = {"auto": 10}
"""The --warmup-steps of an algorithm, by its name; those of others are 2."""
MOST = 16
"""Most contenders at once: each keeps its workers, and their memory."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to train: `dadt run` with these options, or the script by itself."""

    name: str
    ranks: int
    options: tuple[str, ...] = ()
    peer: str = ""
    """A name of PEERS but sync: the script does it, and DADT stays out."""
    plain: bool = False
    """Whether the script trains with neither DADT nor a peer."""

    @property
    def injected(self) -> bool:
        return not self.peer and not self.plain

    @property
    def warmup(self) -> int:
        """Synchronous steps of its own that it takes first."""
        return WARMUP_STEPS.get(self._chosen("--algorithm", ""), 2)

    @property
    def period(self) -> int:
        """Steps in which it exchanges at least once."""
        local = self.injected and self._chosen("--algorithm", "") == "local"
        return int(self._chosen("--sync-every", str(Config().sync_every))) if local else 1

    def _chosen(self, option: str, default: str) -> str:
        """The value of the option, the last one if there are several."""
        pairs = [value for name, value in zip(self.options, self.options[1:], strict=False) if name == option]
        return pairs[-1] if pairs else default


@dataclass(frozen=True, slots=True)
class Task:
    """What each worker trains."""

    model: str = "mlp"
    batch_size: int = 8
    """Samples of each backward, on each worker."""
    device: str = "auto"
    precision: str = "fp32"
    data: str = ""
    accumulate: int = 1
    """The number of backwards in a step."""


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """A contender's figures; each with its interval over rounds."""

    name: str
    ranks: int
    batch_size: int
    options: Sequence[str]
    seconds: Interval
    """Seconds of a step, on the slowest rank."""
    rate: Interval
    """Units (images, tokens) per second of all ranks."""
    rates: list[Interval]
    """Units per second of each rank, by rank."""
    efficiency: Interval | None
    """The rate of all ranks, as a share of that of the same number of copies of the script that exchange nothing. None
    without these."""
    exposed: Interval | None
    """Share of a step's time by which it is longer than under the null executor: communication that nothing hides."""
    speed: Interval
    """Rate, over the first contender's that is not alone or null: the one that others are compared with."""
    memory: int
    """Bytes that the rank with the most has had in use: of the GPU, or of the process."""
    own: float
    """Share of the time that rank 0 spent in DADT's hooks around its steps, waiting included."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One round of contenders, all with the same number of ranks (or one) and the same batch."""

    hello: Hello
    rows: list[TrainingRow]
    turns: list[list[float]] = field(default_factory=list)
    """Seconds of a step for each row, round by round."""
    cpu: list[list[float]] = field(default_factory=list)
    """Processor seconds of a step for each row, round by round, on the rank that needs the most."""


Progress = Callable[[str], None]
"""Called with a text that says what is done next: started, or measured."""


def alone() -> Contender:
    """The script by itself in one process."""
    return Contender("1 worker", 1, plain=True)


def copies(ranks: int) -> Contender:
    """This many copies of the script at once, which share cores, caches and memory but exchange nothing; what scaling
    is measured by."""
    return Contender("plain", ranks, plain=True)


def limit(options: Sequence[str], ranks: int) -> Contender:
    """A contender with these options, except that no byte moves."""
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
    """Every contender takes `steps` counted steps a round, in turn, forwards and backwards. Rounds end once the next
    one would end later than `seconds` after the call, but there are as many as an interval of 95 % needs.

    Raises ConfigError for what cannot be measured, DadtError where a contender fails.
    """
    check(contenders, steps, rounds)
    begun = time.monotonic()
    with ExitStack() as stack:
        location, threads, guess = location or Location(), 0, 0.0
        # Those with the most ranks first: one worker alone gets as many threads as one of theirs. DADT's before plain
        # ones: what the first needs is taken for what each needs.
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
    cpu = [[max(worked.cpu for worked in turn) / steps for turn in each] for each in turns]
    return Measured(hello, rows(contenders, task, hello, turns, steps), [_slowest(t, steps) for t in turns], cpu)


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
    """A machine that has too little for them stands still for minutes before the kernel ends anything."""
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
            own=sum(t[0].own for t in turns[i]) / sum(t[0].seconds for t in turns[i]),
        )
        for i, c in enumerate(contenders)
    ]


def _slowest(turns: Sequence[Sequence[Worked]], steps: int) -> list[float]:
    """Seconds of a step on the slowest rank, by round."""
    return [max(worked.seconds for worked in turn) / steps for turn in turns]


def _start(stack: ExitStack, contender: Contender, task: Task, location: Location, threads: int) -> Party:
    """threads: the number for each worker; 0: as many as the launcher gives it."""
    options = [*contender.options, "--warmup-steps", str(contender.warmup)] if contender.injected else []
    options += [] if contender.injected else ["--inject", "none"]
    if threads:
        options += ["-x", f"OMP_NUM_THREADS={threads}"]
    script = flags_of({"name": contender.name, **asdict(task), "peer": contender.peer})
    return stack.enter_context(start(contender.name, location, contender.ranks, options, script))


def flags_of(values: Mapping[str, object]) -> list[str]:
    """Arguments of the trainer, from their names and values."""
    return [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]
