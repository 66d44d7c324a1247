"""A worker's connection to its host's agent, for reports, questions, and exchanges of keys and values at the start."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dadt import errors
from dadt.control import schema
from dadt.control.accept import connect_to
from dadt.control.frame import CHUNK, Frame, Parser
from dadt.control.heartbeat import Heartbeat
from dadt.control.job_folder import line_of
from dadt.control.worker_line import WorkerLine
from dadt.errors import DadtError
from dadt.world import World

REPORT_SECONDS = 0.2
"""Minimum seconds between two progress reports of a rank, which contain numbers such as samples processed and seconds
waited."""
MOST_REPORTS = 5000
"""Largest number of progress reports per second that the ranks of a job send together, as one launcher receives them
all."""
LISTENER_SECONDS = 1.0
"""Seconds to wait for the end of the thread that receives news of other ranks."""
ANSWER_SECONDS = 10.0
"""Seconds that the agent may take to answer a question, in addition to the question's own timeout."""

AGAIN_SECONDS = 5.0
"""Seconds that an agent may take to create its socket again after someone removed it."""
LOOK_SECONDS = 0.1


def report_seconds(ranks: int) -> float:
    """Return the minimum seconds between two progress reports of one rank, in a job with this number of ranks."""
    return max(REPORT_SECONDS, ranks / MOST_REPORTS)


class Control(WorkerLine):
    """A worker's connection to its host's agent. All reports share one socket and never wait; each question uses a new
    socket. `secret` is empty until the agent has answered `claim`."""

    def __init__(self, world: World, reports: socket.socket, pulse: Heartbeat) -> None:
        self.world, self.secret, self._pid = world, b"", os.getpid()
        self._reports = reports
        self._pulse = pulse
        self._lock = threading.RLock()
        self._unsent: deque[bytes] = deque()
        self._sending = False
        self._reported = 0.0
        self._listener: threading.Thread | None = None

    @classmethod
    def connect(cls, world: World) -> Control | None:
        """Connect to the agent that started this worker; returns None if no agent did.

        Raises DadtError if the agent has ended.
        """
        if not world.agent:
            return None
        try:
            return cls(world, _dial(world), Heartbeat(Path(world.agent).with_name("pulse")))
        except OSError as error:
            raise _gone(world.agent, error) from error

    @property
    def due(self) -> bool:
        return time.monotonic() - self._reported >= report_seconds(self.world.world_size)

    def progress(self, step: int, last: bool = False, **numbers: Any) -> None:
        self._check_process()
        self._pulse.write(self.world.local_rank, step)
        if numbers and (last or self.due):
            self._reported = time.monotonic()
            self._report("numbers", droppable=not last, step=step, numbers=numbers)

    def result(self, blob: bytes) -> None:
        """Send the result or exception of the function that was given to `dadt.run`. Waits for the answer, so that the
        result arrives before the process exits."""
        self._ask("result", 0.0, blob)

    def listen(self, hear: Callable[[Frame], None]) -> bool:
        self._report("listen")
        self._listener = threading.Thread(target=self._listen, args=(hear,), name="dadt-control", daemon=True)
        self._listener.start()
        return True

    def stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None and os.getpid() == self._pid:
            self._reports.shutdown(socket.SHUT_RD)
            listener.join(LISTENER_SECONDS)

    def _listen(self, hear: Callable[[Frame], None]) -> None:
        """Body of the thread that passes news of other ranks to `hear`, until the connection ends. A lost agent is not
        reported here, because the next question to the agent raises an error."""
        parser = Parser(schema.ANSWERS)
        while data := _heard(self._reports):
            for frame in parser.feed(data):
                hear(frame)

    def close(self) -> None:
        self._reports.close()

    def _report(self, kind: str, droppable: bool = False, **header: Any) -> None:
        self._check_process()
        data = _checked(Frame(kind, {"rank": self.world.rank, "pid": self._pid, **header})).encode()
        with self._lock:
            if droppable and not select.select([], [self._reports], [], 0.0)[1]:
                return
            self._unsent.append(data)
            # A signal handler may interrupt this code at any line and send a report itself; the handler's report is
            # queued and then sent by this loop.
            while self._unsent and not self._sending:
                self._sending = True
                try:
                    while self._unsent:
                        self._reports.sendall(self._unsent.popleft())
                except OSError as error:
                    raise _gone(self.world.agent, error) from error
                finally:
                    self._sending = False

    def _ask(self, kind: str, timeout: float, body: bytes = b"", **header: Any) -> Frame:
        self._check_process()
        mine = {"rank": self.world.rank, "pid": self._pid, "timeout": timeout}
        question = _checked(Frame(kind, {**mine, **header}, body))
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


def _dial(world: World) -> socket.socket:
    deadline = time.monotonic() + AGAIN_SECONDS
    while True:
        try:
            return connect_to(line_of(world.agent, world.local_rank))
        # The socket was removed, for example by a cleanup of /tmp; the agent creates it again.
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK_SECONDS)


def _checked(frame: Frame) -> Frame:
    """Return the frame unchanged. If the agent would refuse it, raises DadtError with the reason, since the agent
    itself would only close the connection."""
    if refusal := schema.WORKER.refusal(frame.kind, frame.header, len(frame.body)):
        raise DadtError(refusal)
    return frame


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


def _gone(path: str, error: OSError) -> DadtError:
    if isinstance(error, FileNotFoundError):
        return DadtError(f"{Path(path).parent}, the folder of the running job, was removed, or its agent has ended")
    return DadtError(f"the agent of this host ({path}) is gone: {error.strerror or error}")
