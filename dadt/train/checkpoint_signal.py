"""The Unix signal that makes the script save a checkpoint. If ranks take their steps together, all ranks receive it
after the same step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable


class CheckpointSignal:
    """Raises the signal on all ranks after the same step. `hear` runs on the thread that listens to the agent, all
    other methods on the training thread.

    A script may end once it has saved. With signals in different steps, some ranks would wait for one that has ended,
    and would never save.
    """

    def __init__(self) -> None:
        self.number = 0
        """Number of the Unix signal; 0 if the job has none."""
        self.heard = 0
        """How many orders to save this rank has received from its agent."""
        self._agreed = 0
        """Largest number of orders to save that any rank has received, as an exchange brought it to all ranks."""
        self._raised = 0
        self._lock = threading.Lock()

    def begin(self, number: int, told: int) -> None:
        """Called when this rank's training begins; does nothing if called again. told: number of checkpoint signals
        that the script received before."""
        if self.number:
            return
        self.number = number
        self.heard = self._agreed = self._raised = told

    def hear(self, patience: float) -> None:
        """Called for an order to save: deliver the signal together with the other ranks, or after `patience` seconds if
        they take no step meanwhile. With 0 seconds, deliver it at once, on this rank only."""
        if not patience:
            self._late(self._raised + 1)
            return
        self.heard += 1
        timer = threading.Timer(patience, self._late, [self.heard])
        timer.daemon = True
        timer.start()

    def agree(self, heard: Iterable[int]) -> None:
        """Note the largest number of orders to save that any rank has received. heard: each rank's number of orders, as
        one exchange brought them to all ranks."""
        self._agreed = max(self._agreed, *heard)

    def stepped(self) -> None:
        """Called when a step is complete: deliver the signal if an order to save is pending on any rank."""
        if self._agreed > self._raised:
            self._raise(self._agreed)

    def _late(self, count: int) -> None:
        """Deliver the signal without an agreement on a step: ranks took no step in time, or only this rank must
        save."""
        self._raise(count)

    def _raise(self, count: int) -> None:
        """Deliver the script's signal number `count`, unless it was delivered already."""
        with self._lock:
            due = count > self._raised
            self._raised = max(self._raised, count)
        if due and self.number:
            self._deliver()

    def _deliver(self) -> None:
        """Send the signal to this process if the script handles it; without a handler, it would end the process."""
        if signal.getsignal(self.number) not in (signal.SIG_DFL, signal.SIG_IGN):
            # A real signal wakes the main thread from any wait, which a direct call of the handler would not.
            os.kill(os.getpid(), self.number)
