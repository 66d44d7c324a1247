"""Handles Ctrl-C, which the script receives as a KeyboardInterrupt. If ranks take their steps together, all ranks
receive it after the same step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from dadt.train.checkpoint_signal import CheckpointSignal

_LEAST_SECONDS = 1.0
"""Minimum number of seconds in which exchanges in flight may still complete after Ctrl-C has ended training on this
rank alone."""


class Interruption(CheckpointSignal):
    """Raises KeyboardInterrupt after the same step on all ranks. A script that catches KeyboardInterrupt can save a
    checkpoint, because all ranks have launched every exchange in flight, so that no rank waits for a rank that has
    left."""

    def __init__(self) -> None:
        super().__init__()
        self.number = signal.SIGINT
        self.apart = False
        """Whether Ctrl-C has interrupted only this rank. In this case other ranks may be in another step, so exchanges
        in flight may never complete."""
        self.abort: Callable[[], None] = lambda: None
        """Callback that makes this rank's pending operations fail; any thread may call it."""
        self._patience = 0.0

    def hear(self, patience: float, count: int = 1) -> None:
        if not self.heard:
            self._patience = patience
            self._hear(patience, count)
            self.heard = count

    def _late(self, count: int) -> None:
        if not self._raised:
            self.apart = True
            # A script with its own SIGINT handler may train on to its end, so its exchanges are not aborted.
            if signal.getsignal(self.number) is signal.default_int_handler:
                timer = threading.Timer(max(self._patience, _LEAST_SECONDS), lambda: self.abort())
                timer.daemon = True
                timer.start()
        self._raise(count)

    def _deliver(self) -> None:
        if signal.getsignal(self.number) != signal.SIG_IGN:
            os.kill(os.getpid(), self.number)
