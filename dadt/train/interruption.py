"""Ctrl-C: the script gets it as a KeyboardInterrupt; where ranks step together, all get it after the same step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from dadt.train.checkpoint_signal import CheckpointSignal


class Interruption(CheckpointSignal):
    """A script that catches it saves what it has. After the same step nothing is in flight that some ranks lack, so
    that nobody waits for one that has left."""

    def __init__(self) -> None:
        super().__init__()
        self.number = signal.SIGINT
        self.apart = False
        """This rank got it without the others: they may be in another step, and nothing that they have begun together
        need ever be done."""
        self.on_apart: Callable[[float], None] = lambda patience: None
        """Called then, with the seconds that were left for a common step."""

    def hear(self, patience: float) -> None:
        if not self.heard:
            self._patience = patience
            super().hear(patience)
            self.heard = 1

    def _late(self, count: int) -> None:
        if not self._raised:
            self.apart = True
            self.on_apart(self._patience)
        self._raise(count)

    def _deliver(self) -> None:
        if signal.getsignal(self.number) != signal.SIG_IGN:
            os.kill(os.getpid(), self.number)
