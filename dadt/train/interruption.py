"""Ctrl-C: the script gets it as a KeyboardInterrupt; where ranks step together, all get it after the same step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from dadt.train.checkpoint_signal import CheckpointSignal

_LEAST_SECONDS = 1.0
"""Seconds, at least, that what is in flight may still take once Ctrl-C has ended training on this rank alone."""


class Interruption(CheckpointSignal):
    """A script that catches it saves what it has. After the same step nothing is in flight that some ranks lack, so
    that nobody waits for one that has left."""

    def __init__(self) -> None:
        super().__init__()
        self.number = signal.SIGINT
        self.apart = False
        """This rank got it without the others: they may be in another step, and nothing that they have begun together
        need ever be done."""
        self.abort: Callable[[], None] = lambda: None
        """Fails what this rank waits for. Any thread."""
        self._patience = 0.0

    def hear(self, patience: float) -> None:
        if not self.heard:
            self._patience = patience
            super().hear(patience)
            self.heard = 1

    def _late(self, count: int) -> None:
        if not self._raised:
            self.apart = True
            # A script that handles SIGINT itself trains on until it comes to its end.
            if signal.getsignal(self.number) is signal.default_int_handler:
                timer = threading.Timer(max(self._patience, _LEAST_SECONDS), lambda: self.abort())
                timer.daemon = True
                timer.start()
        self._raise(count)

    def _deliver(self) -> None:
        if signal.getsignal(self.number) != signal.SIG_IGN:
            os.kill(os.getpid(), self.number)
