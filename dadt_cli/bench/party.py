"""The workers of one contender of a benchmark. These workers keep running while other contenders train, and train only
in their own turn."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from dadt.errors import ConfigError, DadtError
from dadt.launch import child
from dadt_cli.bench.folder import folder
from dadt_cli.bench.line import KEY, Hello, Reception, StepOrder, Worked, listen

START_SECONDS = 300.0
TURN_SECONDS = 3600.0
END_SECONDS = 60.0
LOOK_SECONDS = 0.5
TAIL = 2000
"""Bytes at the end of a failed contender's output that its error message quotes."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where workers run: on this machine, or on the hosts that further options of `dadt run` name."""

    options: Sequence[str] = ()
    remote: bool = False
    """Whether some workers run on other machines, which a Unix socket cannot reach."""


class Party:
    def __init__(
        self, name: str, process: subprocess.Popen[bytes], lines: Sequence[Connection], said: IO[bytes]
    ) -> None:
        self._name = name
        self._process = process
        self._lines = lines
        self._said = said
        self.hellos: list[Hello] = []
        """The first message of each worker, ordered by rank."""

    def greet(self) -> None:
        """Receive each worker's first message and order the workers by rank. Raises ConfigError if a worker cannot
        train its task."""
        said = self._receive(self._lines, START_SECONDS)
        for each in said:
            if isinstance(each, ConfigError):
                raise each
        hellos = sorted(zip(said, self._lines, strict=True), key=lambda pair: pair[0].rank)
        self.hellos, self._lines = [hello for hello, _ in hellos], [line for _, line in hellos]

    def train(self, lead: int, steps: int) -> list[Worked]:
        """Have all workers train `lead` uncounted and then `steps` counted steps, and return each rank's measurements.
        Exchanges left over from earlier steps finish within the uncounted steps."""
        for line in self._lines:
            line.send(StepOrder(lead, steps))
        return self._receive(self._lines, TURN_SECONDS)

    def dismiss(self) -> None:
        for line in self._lines:
            line.send(None)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise self._failure(f"has not ended within {END_SECONDS:g} s of its last step") from None

    def _receive(self, lines: Sequence[Connection], seconds: float) -> list[Any]:
        """Receive one message from each connection, in the order of `lines`. Raises DadtError if a worker has ended or
        sends nothing for `seconds` seconds."""
        deadline = time.monotonic() + seconds
        heard: dict[Connection, Any] = {}
        while len(heard) < len(lines):
            silent = [line for line in lines if line not in heard]
            for line in wait(silent, max(0.0, deadline - time.monotonic())):
                assert isinstance(line, Connection)
                try:
                    heard[line] = line.recv()
                except (EOFError, ConnectionResetError):
                    raise self._failure("a worker ended") from None
            if time.monotonic() > deadline:
                raise self._failure(f"{len(lines) - len(heard)} of {len(lines)} workers were silent for {seconds:g} s")
        return [heard[line] for line in lines]

    def _failure(self, what: str) -> DadtError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)  # wait, since the process prints the reason before it exits
        return failure(self._name, what, self._said)


@contextmanager
def start(name: str, location: Location, ranks: int, options: Sequence[str], script: Sequence[str]) -> Iterator[Party]:
    """Start a contender's workers and wait for their first messages. When the block ends, all processes started in the
    block are ended.

    options: those of `dadt run`. script: arguments of the trainer script.
    """
    with ExitStack() as stack:
        reception = stack.enter_context(listen(location.remote, ranks))
        inside = stack.enter_context(folder(f"{KEY}={reception.key}"))
        said = stack.enter_context((inside / "said").open("w+b"))
        command = [sys.executable, "-m", "dadt_cli", "run", "-np", str(ranks), *location.options]
        command += ["--log-dir", str(inside / "logs"), "--output", "errors", "-x", KEY, *options]
        command += ["-m", "dadt_cli.bench.trainer", *script, "--ranks", str(ranks), "--connect", reception.where]
        env = {**os.environ, KEY: reception.key}  # noqa: TID251 (the child's whole environment, not a knob)
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT)
        stack.callback(end, [process])
        lines = [stack.enter_context(accept(reception, [process], name, said)) for _ in range(ranks)]
        party = Party(name, process, lines, said)
        party.greet()
        yield party
        party.dismiss()


def accept(
    reception: Reception, processes: Sequence[subprocess.Popen[bytes]], name: str, said: IO[bytes]
) -> Connection:
    """Accept the connection of the next worker. Raises DadtError if the processes that start workers have ended, or
    START_SECONDS have passed."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        ended = any(process.poll() is not None for process in processes)
        if (connection := reception.accept(LOOK_SECONDS)) is not None:
            return connection
        if ended:
            raise failure(name, "did not start", said)
    raise failure(name, f"did not start within {START_SECONDS:g} s", said)


def failure(name: str, what: str, said: IO[bytes]) -> DadtError:
    said.seek(0)
    tail = said.read()[-TAIL:].decode(errors="replace").strip()
    return DadtError(f"{name}: {what}; it said:\n{tail}" if tail else f"{name}: {what}, without a word")


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        child.end(process, END_SECONDS)
