"""Messages of torch.distributed, which wait in threads of ours: its own waits end connections when they time out."""

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
    """A torch.distributed Work as a P2PWork. What was moved goes to its target when it has come."""

    def __init__(
        self, waiters: Waiters, work: Any, source: int | None, moved: torch.Tensor, target: torch.Tensor
    ) -> None:
        self._waiters = waiters
        self._work = work
        self._source = source
        self._moved = moved
        self._target = target
        self._lock = threading.Lock()
        self.what = "a message"
        """What errors call this message."""
        self._ended: threading.Event | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        return self._awaited().is_set()

    @property
    def source(self) -> int:
        return int(self._work._source_rank()) if self._source is None else self._source

    @property
    def sender(self) -> int | None:
        """The rank from which the message is to come, as the caller asked; None if any rank may send it."""
        return self._source

    def stay(self, timeout: float) -> None:
        """Wait for its end, whatever that is."""
        self._awaited().wait(timeout)

    def begin(self) -> None:
        """Go on with it though nobody waits: what follows the length is asked for when that has come."""
        self._awaited()

    def give_up(self, timeout: float) -> None:
        """After a failure, before the interpreter ends: a thread that comes out of the library later would abort the
        process. A wait that times out closes Gloo's connections, and so ends all others."""
        with self._lock:
            if self._ended is None:  # no thread is in the library for it, nor shall be
                self._error = PeerLost("it was given up")
                self._ended = threading.Event()
                self._ended.set()
        if self._ended.is_set():
            return
        with suppress(Exception):  # whatever it ends with, it was given up
            self._work.wait(datetime.timedelta(milliseconds=1))
        self._ended.wait(timeout)

    def finish(self) -> None:
        """Wait as long as the group does."""
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
        """Set at its end. A thread waits for that: Gloo's works end for who waits only, and a wait of theirs that
        times out closes all connections."""
        with self._lock:
            if self._ended is None:
                self._ended = threading.Event()
                self._waiters.run(partial(self._await, self._ended))
            return self._ended

    def _await(self, ended: threading.Event) -> None:
        try:
            self._work.wait(_LONG)  # not as long as the group does: to be looked at must not end it
            self._fill()
        except Exception as error:  # noqa: BLE001 (raised where it is waited for)
            self._error = error
        ended.set()

    def _fill(self) -> None:
        if self._target is not self._moved:
            self._target.copy_(self._moved)
