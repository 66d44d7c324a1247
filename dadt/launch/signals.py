"""Signals that a selector can wait for."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from dadt.config import Config
from dadt.errors import ConfigError

ENDING_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


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


def forwarded(config: Config) -> list[int]:
    """The numbers of the signals in --forward-signals. Raises ConfigError."""
    numbers = []
    for name in filter(None, (part.strip().upper() for part in config.forward_signals.split(","))):
        number = getattr(signal, name if name.startswith("SIG") else f"SIG{name}", None)
        if not isinstance(number, signal.Signals) or number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise ConfigError(f"--forward-signals {config.forward_signals}: {name} is no signal that can be forwarded")
        if number not in ENDING_SIGNALS:  # these end the job, and workers get SIGTERM
            numbers.append(int(number))
    return numbers
