"""Memory that operations read and write: it must live until they have ended, whatever becomes of their handles."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

_FEW = 64
"""Number of operations up to which those that are done are released only after the ones started before them."""
_forever: list[Any] = []


class Completion(Protocol):
    """An operation, or a handle to one."""

    @property
    def done(self) -> bool: ...


class KeepAlive:
    """Keeps alive what the operations under way need. Any thread.

    One that fails is done at once, as nobody shall wait for it, but a library may be in it for as long as it likes:
    from the first error on all is kept for good.
    """

    def __init__(self, failed: Callable[[], bool]) -> None:
        """failed: whether there was an error; if so, from a time before any operation is done by it."""
        self._failed = failed
        self._lock = threading.Lock()
        self._held: deque[tuple[Completion, Any]] = deque()
        self._most = _FEW

    def add(self, ending: Completion, needed: Any) -> None:
        """Keep what is needed until that is done."""
        with self._lock:
            gone = deque[tuple[Completion, Any]]()  # outlives the lock: what is let go may run code of its owner's
            self._held.append((ending, needed))
            if len(self._held) > self._most:
                gone = self._held
                self._held = deque(each for each in gone if not each[0].done)
                self._most = max(_FEW, 2 * len(self._held))
            while self._held and self._held[0][0].done:
                gone.append(self._held.popleft())
            self._keep_if_failed(gone)
        del gone

    def close(self) -> None:
        """Release everything, as nothing is under way any more; after an error, keep it for good instead."""
        with self._lock:
            gone, self._held = self._held, deque()
            self._keep_if_failed(gone)
        del gone

    def _keep_if_failed(self, gone: deque[tuple[Completion, Any]]) -> None:
        """After an error, keep for good what is about to be released, and what is held. Call it after looking at
        `done`: what was done before there was an error has ended."""
        if self._failed():
            leak((gone, self._held))
            self._held = deque()


def leak(needed: Any) -> None:
    """Keep for good what a failed operation needs: a library may still be using it."""
    _forever.append(needed)
