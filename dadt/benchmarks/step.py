"""How long a training step takes with and without: the same script started in several ways, measured in turn."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path

from dadt.benchmarks.ratio import Interval, interval, ratio
from dadt.errors import DadtError

CONNECT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Way:
    """One way to start the script: `dadt run` with options, or plain python where they are None."""

    name: str
    options: Sequence[str] | None


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds of one step, and the ratio to the first way's, pair by pair."""

    name: str
    seconds: Interval
    ratio: Interval
    own: float | None = None
    """Share of the time that rank 0 spent in DADT's hooks around its steps, waiting included."""


class Party:
    """The workers of one way: started, waiting, and training only when it is their turn."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], lines: Sequence[Connection], said: Path) -> None:
        self._name = name
        self._said = said
        self.process = process
        self._lines = lines
        self._seconds = 0.0
        self._own = 0.0

    @property
    def own(self) -> float:
        return self._own / self._seconds if self._seconds else 0.0

    def train(self, steps: int) -> float:
        """Seconds of a step: median over steps of the slowest rank."""
        for line in self._lines:
            line.send(steps)
        try:
            turns = [line.recv() for line in self._lines]
        except EOFError:
            tail = self._said.read_bytes()[-2000:].decode(errors="replace")
            raise DadtError(f"{self._name}: a worker ended; it said: {tail}") from None
        times, own = turns[0]
        self._seconds += sum(times)
        self._own += own
        return float(statistics.median(max(step) for step in zip(*(times for times, _ in turns), strict=True)))

    def dismiss(self) -> None:
        for line in self._lines:
            line.send(0)
        self.process.wait(CONNECT_SECONDS)


@contextmanager
def _start(way: Way, ranks: int, model: str, batch_size: int) -> Iterator[Party]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dadt-bench-"))
        address = str(Path(folder, "s"))
        listener = stack.enter_context(Listener(address, "AF_UNIX", backlog=ranks))
        script = ["-m", "dadt.benchmarks.trainer", "--model", model, "--batch-size", str(batch_size)]
        script += ["--connect", address, "--name", way.name]
        if way.options is None:
            command = [sys.executable, *script]
        else:
            launcher = [sys.executable, "-m", "dadt_cli", "run", "-np", str(ranks), "--log-dir", folder]
            command = [*launcher, "--output", "errors", *way.options, *script]
        said = stack.enter_context(Path(folder, "said").open("w+b"))
        process = subprocess.Popen(command, env=one_thread(), stdout=said, stderr=said)
        try:
            # A worker that dies before it connects would leave accept() waiting for ever.
            listener._listener._socket.settimeout(CONNECT_SECONDS)  # type: ignore[attr-defined]
            try:
                lines = [stack.enter_context(listener.accept()) for _ in range(ranks if way.options is not None else 1)]
            except TimeoutError:
                tail = Path(said.name).read_bytes()[-2000:].decode(errors="replace")
                raise DadtError(f"{way.name} did not start within {CONNECT_SECONDS:.0f} s; it said: {tail}") from None
            for line in lines:
                line.recv()
            party = Party(way.name, process, lines, Path(said.name))
            yield party
            party.dismiss()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(10)


def one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}  # noqa: TID251 (the child's whole environment, not a knob)


def measure(
    ways: Sequence[Way], *, ranks: int, model: str, batch_size: int, steps: int, rounds: int, warmup: int = 4
) -> list[Result]:
    """All ways stay up; they train in turn, `steps` steps a round, so that all see the same machine.

    ratio: each way's seconds over the first way's of the same round.
    """
    with ExitStack() as stack:
        parties = [stack.enter_context(_start(way, ranks, model, batch_size)) for way in ways]
        for party in parties:
            party.train(warmup)
        times: list[list[float]] = [[] for _ in ways]
        for turn in range(rounds):
            order = range(len(ways)) if turn % 2 == 0 else reversed(range(len(ways)))
            for i in order:
                times[i].append(parties[i].train(steps))
        return [
            Result(way.name, interval(t), ratio(t, times[0]), party.own)
            for way, party, t in zip(ways, parties, times, strict=True)
        ]
