"""Delivers the Unix signal that makes the script save a checkpoint. If ranks take their steps together, all ranks
receive it after the same step.

The exchange of a step tells its ranks which of them have received the order. In islands it connects only ranks that
hold the same part of the model. There each rank tells all others over the launcher, while it trains on, how many steps
it had completed when the order came, and ends no further step before it has their answers. So no rank has completed the
step after the largest of these numbers, and all raise the signal behind this one.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable

from dadt.errors import DadtError


class CheckpointSignal:
    """Raises the signal on all ranks after the same step. `hear` runs on the thread that listens to the agent, all
    other methods on the training thread.

    A script may end once it has saved. If the signals came in different steps, some ranks would wait for a rank that
    has ended, and would never save.
    """

    def __init__(self) -> None:
        self.number = 0
        """Number of the Unix signal; 0 if the job has none."""
        self.heard = 0
        """Number of orders to save that this rank has received from its agent."""
        self._agreed = 0
        """Largest number of orders to save that any rank has received, as all ranks know from the same exchange."""
        self._raised = 0
        self._lock = threading.Lock()
        self.meet: Callable[[str, bytes, float], list[bytes]] | None = None
        """In islands, exchanges bytes with all ranks of the job over the launcher: takes a key, this rank's bytes, and
        the seconds to wait for the others. Raises DadtError."""
        self._step = 0
        """Number of steps that this rank has completed."""
        self._due = 0
        """In islands, number of the step after which all ranks raise the signal."""
        self._asking = 0
        """Number of exchanges of steps with the others that are under way."""
        self._asked = threading.Condition()

    def begin(self, number: int, told: int) -> None:
        """Set the signal's number when this rank's training begins; does nothing if called again. told: number of
        checkpoint signals that the script has already received."""
        if self.number:
            return
        self.number = number
        self.heard = self._agreed = self._raised = told

    def hear(self, patience: float) -> None:
        """Handle an order to save: deliver the signal together with the other ranks, or after `patience` seconds if
        ranks take no step until then. With 0 seconds, deliver it at once, on this rank only."""
        if not patience:
            self._late(self._raised + 1)
            return
        with self._asked:
            self.heard += 1
            if self.meet is not None:
                self._asking += 1
                order = self.heard, self._step, patience
                threading.Thread(target=self._ask, args=order, name="dadt-signal", daemon=True).start()
        timer = threading.Timer(patience, self._late, [self.heard])
        timer.daemon = True
        timer.start()

    def _ask(self, count: int, step: int, patience: float) -> None:
        """Find the step after which all ranks raise the signal number `count`. step: number of steps that this rank
        had completed when the order came."""
        assert self.meet is not None
        try:
            steps = [int(each) for each in self.meet(f"signal {self.number}, {count}", str(step).encode(), patience)]
        except DadtError:  # a rank is lost, or says nothing; the signal comes when `patience` is over
            steps = []
        with self._asked:
            self._asking -= 1
            if steps:
                self._agreed, self._due = max(self._agreed, count), max(steps) + 1
            self._asked.notify_all()

    def agree(self, heard: Iterable[int]) -> None:
        """Note the largest number of orders to save that any rank has received. heard: each rank's number of orders,
        which came to all ranks with the same exchange."""
        self._agreed = max(self._agreed, *heard)

    def stepped(self, step: int) -> None:
        """Deliver the signal if an order to save is pending on any rank. Called when a step is complete. step: number
        of steps that are complete."""
        with self._asked:
            self._step = step
            self._asked.wait_for(lambda: not self._asking)  # no longer than `meet` waits
        if self._agreed > self._raised and step >= self._due:
            self._raise(self._agreed)

    def _late(self, count: int) -> None:
        """Deliver the signal although ranks have not agreed on a step, because they took no step in time, or only this
        rank must save."""
        self._raise(count)

    def _raise(self, count: int) -> None:
        """Deliver the script's signal number `count`, unless it was delivered already."""
        with self._lock:
            due = count > self._raised
            self._raised = max(self._raised, count)
        if due and self.number:
            self._deliver()

    def _deliver(self) -> None:
        """Send the signal to this process if the script handles it. Without a handler, the signal would end the
        process."""
        if signal.getsignal(self.number) not in (signal.SIG_DFL, signal.SIG_IGN):
            # A real signal wakes the main thread from any wait, which a direct call of the handler would not.
            os.kill(os.getpid(), self.number)
