"""Signals that a selector can wait for."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """While open, these signals do not end the process; their numbers are read from `fileno()`.

    For the main thread only, like all signal handling in Python.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # SIGHUP stays ignored under nohup.
        spared = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
        taken = [number for number in self._numbers if number not in spared]
        self._previous = {number: signal.signal(number, _ignore) for number in taken}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        return self._reader

    def take(self) -> set[int]:
        """The signals that have come since the last call."""
        try:
            return set(os.read(self._reader, 4096))
        except BlockingIOError:
            return set()


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing, as Python writes the number to the wake-up pipe."""
