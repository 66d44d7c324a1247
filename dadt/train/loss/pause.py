"""Lets another thread read a rank's weights between its steps, in algorithms whose ranks train at their own speed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dadt.errors import CommTimeout


class Pause:
    """A lock that keeps steps and readers of the weights apart: the training thread calls `begin` and `end`, and a
    thread that reads weights uses `still`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._steps = 0
        """Number of optimizer steps under way, possibly more than one if there are several optimizers."""

    def begin(self) -> None:
        """Begin a step that changes weights. Waits while another thread reads them."""
        with self._changed:
            if not self._steps:
                self._changed.wait_for(lambda: not self._readers)
            self._steps += 1

    def end(self) -> None:
        """Let other threads read the weights again, because the step is over or was skipped."""
        with self._changed:
            self._steps = max(0, self._steps - 1)
            self._changed.notify_all()

    @contextmanager
    def still(self, seconds: float) -> Iterator[None]:
        """Context in which no step changes the weights. Raises CommTimeout if a running step takes longer than
        `seconds` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._steps, seconds):
                raise CommTimeout(f"a step took longer than {seconds:g} s, and nobody could read the weights meanwhile")
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()
