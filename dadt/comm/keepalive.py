"""Keeps memory alive while operations read and write it, even if the script drops their handles."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

_FEW = 64
"""Number of operations in the queue up to which it is only checked from its oldest end, which is cheaper than checking
all."""
_forever: list[Any] = []


class Waited(Protocol):
    """An operation in progress, or a handle to one."""

    @property
    def done(self) -> bool: ...
    def wait(self, timeout: float) -> Any: ...


class KeepAlive:
    """Keeps the objects that operations in progress need alive. Methods may be called from any thread.

    A failed operation counts as done at once, so that nobody waits for it, but a library may still use its memory.
    Therefore, from the first error on, nothing is ever released.
    """

    def __init__(self, failed: Callable[[], bool]) -> None:
        """failed: returns whether there was an error. It must return True before any operation becomes `done` because
        of the error."""
        self._failed = failed
        self._lock = threading.Lock()
        self._held: deque[tuple[Waited, Any]] = deque()
        self._most = _FEW

    def add(self, ending: Waited, needed: Any) -> None:
        """Keep `needed` alive until the operation `ending` is done."""
        with self._lock:
            # The queue is deleted after the lock is released, because destructors of its objects may run any code.
            gone = deque[tuple[Waited, Any]]()
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
        """Release all objects, since no operation is in progress any more. After an error, keep them alive forever
        instead."""
        with self._lock:
            gone, self._held = self._held, deque()
            self._keep_if_failed(gone)
        del gone

    def _keep_if_failed(self, gone: deque[tuple[Waited, Any]]) -> None:
        """After an error, keep alive forever both what is about to be released and what is still in use. Call this
        after checking `done`, because only an operation that was done before the error has surely ended."""
        if self._failed():
            leak((gone, self._held))
            self._held = deque()


def leak(needed: Any) -> None:
    """Keep an object alive until the process exits, because a library may still use it after a failure."""
    _forever.append(needed)
