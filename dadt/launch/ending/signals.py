"""Makes signals readable from a file descriptor, so that a selector can wait for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import FrameType
from typing import Any

from dadt.config import Config
from dadt.errors import ConfigError

ENDING_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


class Interrupts:
    """Context manager in which the signals `numbers` do not end the process but make `fileno()` readable; `take` then
    returns them. Usable in the main thread only, like all signal handling in Python."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # A process that nohup has started ignores SIGHUP, and has to continue to do so.
        spared = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
        taken = [number for number in self._numbers if number not in spared]
        self._previous = {number: signal.signal(number, _ignore) for number in taken}
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        return self._reader

    def take(self) -> set[int]:
        """Return the numbers of the signals that have arrived since the last call."""
        try:
            return set(os.read(self._reader, 4096))
        except BlockingIOError:
            return set()


def _ignore(number: int, frame: FrameType | None) -> None:
    """Signal handler that does nothing, because Python itself writes the signal's number to the wake-up pipe."""


def forwarded(config: Config) -> list[int]:
    """Return the numbers of the signals named in --forward-signals. Raises ConfigError."""
    names = filter(None, (part.strip() for part in config.forward_signals.split(",")))
    numbers = [_number(name, f"--forward-signals {config.forward_signals}") for name in names]
    # ENDING_SIGNALS are not forwarded, because they end the job, and its workers then receive SIGTERM.
    return [number for number in numbers if number not in ENDING_SIGNALS]


def of_checkpoint(config: Config) -> int:
    """Return the number of the signal of --checkpoint-signal; 0 if not set. Raises ConfigError."""
    if not config.checkpoint_signal:
        return 0
    number = _number(config.checkpoint_signal, given := f"--checkpoint-signal {config.checkpoint_signal}")
    if number in ENDING_SIGNALS:
        raise ConfigError(f"{given}: this signal ends the job; give one that the script answers by saving, as USR1")
    return number


def _number(name: str, given: str) -> int:
    word = name.upper()
    number = getattr(signal, word if word.startswith("SIG") else f"SIG{word}", None)
    if not isinstance(number, signal.Signals) or number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
        raise ConfigError(f"{given}: {word} is no signal that can be forwarded")
    return int(number)
