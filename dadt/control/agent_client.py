"""A worker's line to the agent of its host: who is here, what happened, what all must know to begin."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dadt import errors
from dadt.control import schema
from dadt.control.frame import CHUNK, Frame, Parser
from dadt.control.heartbeat import Heartbeat
from dadt.control.job_folder import line_of
from dadt.errors import DadtError
from dadt.world import World

REPORT_SECONDS = 0.2
"""Numbers that go with a step are sent at most this often."""
SHOWN = 4096
"""FramedMessages of a path, or of a line of source."""
LISTENER_SECONDS = 1.0
"""How long the thread that hears of other ranks' ends may take to end."""
ANSWER_SECONDS = 10.0
"""How long the agent may take to answer, on top of what the question itself may take."""


class Control:
    """Thread-safe. Reports share one connection and never wait; each question has a connection of its own.

    Belongs to the process that connected: in a forked child every method raises DadtError.
    """

    def __init__(self, world: World, reports: socket.socket, pulse: Heartbeat) -> None:
        self.world = world
        self._reports = reports
        self._pulse = pulse
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._reported = 0.0
        self.secret = b""
        """Of the job, known once the rank is claimed."""
        self._listener: threading.Thread | None = None

    @classmethod
    def connect(cls, world: World) -> Control | None:
        """The line to the agent that started this worker; None where no agent did.

        Raises DadtError if the agent is gone.
        """
        if not world.agent:
            return None
        try:
            return cls(world, _dial(world), Heartbeat(Path(world.agent).with_name("pulse")))
        except OSError as error:
            raise _gone(world.agent, error) from error

    def hello(self, torch: str) -> None:
        """This process has imported torch (its version) and DADT is hooked in."""
        self._report("hello", torch=torch)

    def stacks(self, path: Path, signal: int) -> None:
        """On this signal, this process writes the stacks of its threads to the file."""
        self._report("stacks", path=str(path), signal=int(signal))

    def claim(self) -> None:
        """This process trains as this rank. Again by the same process: nothing happens.

        Raises DadtError if another living process has claimed the rank.
        """
        self.secret = self._ask("claim", 0.0).body

    def exchange(self, key: str, blob: bytes, timeout: float) -> list[bytes]:
        """Every rank's blob for the key, by rank; each key once per job.

        Raises StartTimeout after `timeout` seconds, or as soon as a missing rank has exited, naming the
        missing ranks and how far they came.
        """
        return _parts(self._ask("exchange", timeout, blob, key=key))

    def put(self, key: str, blob: bytes) -> None:
        """For whichever rank asks for the key; each key once per job. Raises DadtError where it has been put, and
        where this rank has put too much."""
        self._ask("put", 0.0, blob, key=key)

    def get(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        """What some ranks have put there, or will. Raises StartTimeout as `exchange`, naming those that have not."""
        return _parts(self._ask("get", timeout, keys=list(keys)))

    def say(self, text: str, level: str = "info") -> None:
        """The launcher prints `dadt: text`, once however many ranks say it. level: info or warning."""
        self._report("say", text=text[: schema.TEXT], level=level)

    @property
    def due(self) -> bool:
        """Numbers that are given to `progress` now would be sent: five times a second."""
        return time.monotonic() - self._reported >= REPORT_SECONDS

    def progress(self, step: int, last: bool = False, **numbers: Any) -> None:
        """Optimizer steps done so far. Costs a write to memory; numbers are sent when they are due, the last ones
        always."""
        self._check_process()
        self._pulse.write(self.world.local_rank, step)
        if numbers and (last or self.due):
            self._reported = time.monotonic()
            self._report("numbers", droppable=not last, step=step, numbers=numbers)

    def failed(
        self,
        type: str,
        message: str,
        frames: Sequence[Mapping[str, Any]] = (),
        step: int | None = None,
        secondary: bool = False,
        thread: str = "",
    ) -> None:
        """An uncaught exception: its type and text, and frames {file, line, function, text}, innermost last.

        secondary: another rank's failure caused it. thread: name of the thread, empty for the main one.
        """
        self._report(
            "failed",
            type=type,
            message=message[: schema.TEXT],
            frames=[{name: _shortened(value) for name, value in frame.items()} for frame in frames[-16:]],
            step=step,
            secondary=secondary,
            thread=thread[:SHOWN],
            time=time.time(),
        )

    def ending(self, steps: int) -> None:
        """The script is over after so many steps; this rank waits for the others to end, too."""
        self._report("ending", steps=steps)

    def done(self, summary: Mapping[str, float]) -> None:
        """Training has ended well: {steps, delayed, wait_fraction} and whatever else is known."""
        self._report("done", summary=dict(summary))

    def result(self, blob: bytes) -> None:
        """What the function of `dadt.run` returned or raised; arrives before this process's end is known."""
        self._ask("result", 0.0, blob)

    def peers(self) -> list[dict[str, Any]]:
        """All ranks, by rank: {rank, pid, state, step (-1: none), seconds (since the last sign of life)}."""
        ranks: list[dict[str, Any]] = self._ask("peers", 0.0)["peers"]
        return ranks

    def dump(self) -> None:
        """Have every rank's Python stacks put beside its log."""
        self._report("dump")

    def saved(self, path: str, count: int) -> None:
        """Local rank 0 has written the file for the count-th time."""
        self._report("saved", path=path, count=count)

    def await_save(self, path: str, count: int, step: int, timeout: float) -> str:
        """Wait until local rank 0 has written the file `count` times.

        "there": it has. "write": it went on to a later step than `step`, ended, or was not there within
        `timeout` seconds, so the caller writes the file itself.
        """
        return str(self._ask("await_save", timeout, path=path, count=count, step=step)["verdict"])

    def listen(self, hear: Callable[[str, int | None], None]) -> bool:
        """From now on what the agent tells of other ranks' ends goes to `hear`, in a thread of its own: what is to be
        said of it, and after how many steps if it ended well. Call it once. Whether there is anybody who tells."""
        self._report("listen")
        self._listener = threading.Thread(target=self._listen, args=(hear,), name="dadt-control", daemon=True)
        self._listener.start()
        return True

    def stop_listening(self) -> None:
        """What this rank waited for is over. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None and os.getpid() == self._pid:
            self._reports.shutdown(socket.SHUT_RD)
            listener.join(LISTENER_SECONDS)

    def _listen(self, hear: Callable[[str, int | None], None]) -> None:
        """Ends with the connection: also where the agent is gone, which whoever asks it is told."""
        parser = Parser(schema.ANSWERS)
        while data := _heard(self._reports):
            for frame in parser.feed(data):
                hear(frame["text"], frame.get("steps"))

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._reports.close()

    def _report(self, kind: str, droppable: bool = False, **header: Any) -> None:
        self._check_process()
        data = _checked(Frame(kind, {"rank": self.world.rank, "pid": self._pid, **header})).encode()
        with self._lock:
            try:
                if not droppable or select.select([], [self._reports], [], 0.0)[1]:
                    self._reports.sendall(data)
            except OSError as error:
                raise _gone(self.world.agent, error) from error

    def _ask(self, kind: str, timeout: float, body: bytes = b"", **header: Any) -> Frame:
        self._check_process()
        told = {"rank": self.world.rank, "pid": self._pid, "timeout": timeout, **header}
        question = _checked(Frame(kind, told, body))
        deadline = time.monotonic() + timeout + ANSWER_SECONDS
        try:
            with _dial(self.world) as line:
                line.settimeout(timeout + ANSWER_SECONDS)
                line.sendall(question.encode())
                answer = _receive(line, deadline)
        except TimeoutError:
            raise DadtError(f"the agent of this host ({self.world.agent}) did not answer to {kind}") from None
        except OSError as error:
            raise _gone(self.world.agent, error) from error
        if answer.kind == "error":
            raise getattr(errors, answer["type"])(answer["message"])
        return answer

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise DadtError(f"process {os.getpid()} is a fork of worker {self.world.rank} and cannot speak for it")


def _dial(world: World) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.connect(str(line_of(world.agent, world.local_rank)))
    except OSError:
        line.close()
        raise
    return line


def _checked(frame: Frame) -> Frame:
    """Raises DadtError for what the agent would refuse, where it can still be told why."""
    if refusal := schema.WORKER.refusal(frame.kind, frame.header, len(frame.body)):
        raise DadtError(refusal)
    return frame


def _shortened(value: Any) -> Any:
    return value[:SHOWN] if isinstance(value, str) else value


def _receive(line: socket.socket, deadline: float) -> Frame:
    parser = Parser(schema.ANSWERS)
    while True:
        line.settimeout(max(deadline - time.monotonic(), 0.001))
        data = line.recv(CHUNK)
        if not data:
            raise ConnectionResetError("it closed the connection")
        for frame in parser.feed(data):
            return frame


def _heard(line: socket.socket) -> bytes:
    try:
        return line.recv(CHUNK)
    except OSError:
        return b""


def _parts(answer: Frame) -> list[bytes]:
    """Of a body that several blobs make."""
    blobs: list[bytes] = []
    start = 0
    for size in answer["sizes"]:
        blobs.append(answer.body[start : start + size])
        start += size
    return blobs


def _gone(path: str, error: OSError) -> DadtError:
    return DadtError(f"the agent of this host ({path}) is gone: {error.strerror or error}")
