"""Messages over torch.distributed. Threads of DADT's own wait for the messages, because a wait in Gloo that times out
closes all connections."""

from __future__ import annotations

import datetime
import threading
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from dadt.comm.waiters import Waiters
from dadt.errors import CommTimeout, Mismatch, PeerLost

_LONG = datetime.timedelta(days=30)


class C10dMessage:
    """A torch.distributed Work as a P2PWork. Received values are copied to the caller's tensor if they arrive in other
    memory."""

    def __init__(
        self, waiters: Waiters, work: Any, source: int | None, moved: torch.Tensor, target: torch.Tensor
    ) -> None:
        self._waiters = waiters
        self._work = work
        self.sender = source
        """Rank that was named as the message's sender; None if any rank may send it."""
        self._moved = moved
        self._target = target
        self._lock = threading.Lock()
        self.what = "a message"
        """Name of this message in error texts."""
        self._ended: threading.Event | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        return self._awaited().is_set()

    @property
    def source(self) -> int:
        return int(self._work._source_rank()) if self.sender is None else self.sender

    def stay(self, timeout: float) -> None:
        """Wait until the message has ended, with or without an error, for at most `timeout` seconds."""
        self._awaited().wait(timeout)

    def begin(self) -> None:
        """Start the waiting thread, so that the message proceeds without a caller: its body is requested only after its
        length has arrived."""
        self._awaited()

    def give_up(self, timeout: float) -> None:
        """End the message after a failure. A thread still inside the library when the interpreter ends would abort the
        process; a wait that times out closes Gloo's connections, which also ends all other waits."""
        with self._lock:
            if self._ended is None:  # no thread waits in the library for this message, and none will start
                self._error = PeerLost("it was given up")
                self._ended = threading.Event()
                self._ended.set()
        if self._ended.is_set():
            return
        with suppress(Exception):  # how the wait ends does not matter, since the message is given up
            self._work.wait(datetime.timedelta(milliseconds=1))
        self._ended.wait(timeout)

    def finish(self) -> None:
        """Wait for the message on the calling thread, for as long as the process group's own timeout allows."""
        self._work.wait()
        self._fill()

    def wait(self, timeout: float) -> None:
        if not self._awaited().wait(min(timeout, threading.TIMEOUT_MAX)):
            raise CommTimeout(f"{self.what} was not done within {timeout:g} s")
        if self._error is None:
            return
        if isinstance(self._error, Mismatch):
            raise self._error
        text = str(self._error)
        if "imed out" in text:
            raise CommTimeout(f"{self.what} was not done: {text}") from self._error
        raise PeerLost(f"{self.what} was not delivered: {text}") from self._error

    def _awaited(self) -> threading.Event:
        """Return an event that is set when the message ends. A thread waits for the message, since Gloo's works only
        complete while waited for, and a wait that times out closes all connections."""
        with self._lock:
            if self._ended is None:
                self._ended = threading.Event()
                self._waiters.run(partial(self._await, self._ended))
            return self._ended

    def _await(self, ended: threading.Event) -> None:
        try:
            # Wait longer than the group's timeout, since a wait that times out would close all connections.
            self._work.wait(_LONG)
            self._fill()
        except Exception as error:  # noqa: BLE001 (raised where it is waited for)
            self._error = error
        ended.set()

    def _fill(self) -> None:
        if self._target is not self._moved:
            self._target.copy_(self._moved)
