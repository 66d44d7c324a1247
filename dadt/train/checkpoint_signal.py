"""Delivers the Unix signal that makes the script save a checkpoint. If ranks take their steps together, all ranks
receive it after the same step, or at least all ranks of an island."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from functools import partial

from dadt.train.common_step import CommonStep


class CheckpointSignal:
    """Raises the signal on all ranks after the same step. `hear` runs on the thread that listens to the agent, all
    other methods on the training thread.

    A script may end once it has saved. If the signals came in different steps, some ranks would wait for a rank that
    has ended, and would never save. In an island they would call different collectives, so that no rank of it gets the
    signal where they do not agree on a step.
    """

    def __init__(self) -> None:
        self.number = 0
        """Number of the Unix signal; 0 if the job has none."""
        self.heard = 0
        """Number of the latest order to save that this rank has received, as the launcher counts the orders to all
        ranks."""
        self._agreed = 0
        """Largest number of an order that any rank has received, as all ranks know from the same exchange."""
        self._raised = 0
        self._lock = threading.Lock()
        self.common_step: CommonStep | None = None
        """Finds the step after which all ranks raise the signal, where their exchanges do not connect all of them."""
        self._due = 0
        """Number of this step."""
        self.together = True
        """Whether ranks of different islands take their steps together."""
        self.unable: Callable[[int], None] = lambda number: None
        """Called with the number of an order to save for which this rank's island has found no step, as not all of its
        ranks take steps."""
        self._leaves = False
        """Whether this rank's island was told to save as one of its hosts is taken away."""

    def begin(self, number: int, told: int) -> None:
        """Set the signal's number when this rank's training begins; does nothing if called again. told: number of
        checkpoint signals that the script has already received."""
        if self.number:
            return
        self.number = number
        self.heard = self._agreed = self._raised = told

    def hear(self, patience: float, count: int) -> None:
        """Handle the order to save number `count`, or 0 if only some ranks are to save: deliver the signal together
        with the other ranks, or after `patience` seconds if ranks take no step until then. With 0 seconds, deliver it
        at once, on this rank only."""
        if patience and self.common_step is not None and self.common_step.in_islands:
            self._hear_in_island(self.common_step, patience, count)
        else:
            self._hear(patience, count)

    def _hear(self, patience: float, count: int) -> None:
        if not patience:
            self._late(self._raised + 1)
            return
        self.heard = max(self.heard, count)
        if self.common_step is not None:
            self.common_step.find(f"signal {self.number}, {count}", patience, partial(self._agree_on, count))
        _after(patience, partial(self._late, count))

    def _hear_in_island(self, common_step: CommonStep, patience: float, count: int) -> None:
        """Look for a step with all ranks, and at the same time with those of the island, which counts where not all
        ranks have heard of it."""
        if not count and self._leaves:
            return  # a second host is taken away
        self._leaves |= not count
        # The same on all ranks of the island: some may have been told of former orders as they began, or missed them.
        number = count or max(self.heard, self._raised) + 1
        self.heard = max(self.heard, count)
        if count and self.together:
            common_step.find(f"signal {self.number}, {count}", patience, partial(self._agree_on, count))
        found = partial(self._agree_in_island, common_step, number, patience)
        common_step.find_in_island(f"signal {self.number}, {number}", patience, found, partial(self._missed, number))

    def _missed(self, number: int) -> None:
        if self._agreed < number:
            self.unable(number)

    def _agree_in_island(self, common_step: CommonStep, count: int, patience: float, step: int) -> None:
        """Note that all ranks of the island raise the signal number `count` after this step, unless all ranks have
        agreed on one. If they take no step in time, those that are in this step raise it."""
        if self._agreed < count:
            self._agree_on(count, step)

        def in_time() -> None:
            if common_step.step >= self._due - 1:
                self._late(count)

        _after(patience, in_time)

    def _agree_on(self, count: int, step: int) -> None:
        """Note that all ranks raise the signal number `count` after this step."""
        self._agreed, self._due = max(self._agreed, count), step

    def agree(self, heard: Iterable[int]) -> None:
        """Note the largest number of an order to save that any rank has received. heard: each rank's number, which came
        to all ranks with the same exchange."""
        self._agreed = max(self._agreed, *heard)

    def stepped(self, step: int) -> None:
        """Deliver the signal if an order to save is pending on any rank. Called when a step is complete. step: number
        of steps that are complete."""
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


def _after(seconds: float, do: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, do)
    timer.daemon = True
    timer.start()
