"""The signal by which the script is to save: where ranks take their steps together, all get it after the same one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable


class CheckpointSignal:
    """`hear` is called by the thread that listens to the agent, all else by the training thread.

    A script may end once it has saved. If that were in different steps, some ranks would wait for one that has ended,
    and never come to save.
    """

    def __init__(self) -> None:
        self.number = 0
        """The number of the signal; 0: the job has none."""
        self.heard = 0
        """How often the agent has sent this rank the order to save."""
        self._agreed = 0
        """The most orders that any rank has received, as all ranks know from an exchange."""
        self._raised = 0
        self._lock = threading.Lock()

    def begin(self, number: int, told: int) -> None:
        """This rank trains from now on. told: how often the script got the signal before, without this. Idempotent."""
        if self.number:
            return
        self.number = number
        self.heard = self._agreed = self._raised = told

    def hear(self, patience: float) -> None:
        """The script gets the signal with the others', or after `patience` seconds, as it may take no step for long. 0:
        at once, and the others do not."""
        if not patience:
            self._late(self._raised + 1)
            return
        self.heard += 1
        timer = threading.Timer(patience, self._late, [self.heard])
        timer.daemon = True
        timer.start()

    def agree(self, heard: Iterable[int]) -> None:
        """heard: how many orders each rank has received, as all ranks know from one exchange."""
        self._agreed = max(self._agreed, *heard)

    def stepped(self) -> None:
        """A step is complete, and nothing of it is left to do."""
        if self._agreed > self._raised:
            self._raise(self._agreed)

    def _late(self, count: int) -> None:
        """The ranks have not agreed on a step in time, or were not to."""
        self._raise(count)

    def _raise(self, count: int) -> None:
        """Give the script the signal for the count-th time, unless it has had it so often."""
        with self._lock:
            due = count > self._raised
            self._raised = max(self._raised, count)
        if due and self.number:
            self._deliver()

    def _deliver(self) -> None:
        """Send this process the signal, if the script handles it: otherwise the process would end."""
        if signal.getsignal(self.number) not in (signal.SIG_DFL, signal.SIG_IGN):
            os.kill(os.getpid(), self.number)  # wakes the main thread, whatever it waits for
