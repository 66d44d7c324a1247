"""Between steps another thread may read what a rank trains, where ranks train apart and wait for nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dadt.errors import CommTimeout


class Pause:
    """The training thread calls `begin` and `end`, another one `still`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._steps = 0
        """Optimizer steps that are under way: with several optimizers there may be more than one."""

    def begin(self) -> None:
        """Weights are about to change. Waits while another thread reads them."""
        with self._changed:
            if not self._steps:
                self._changed.wait_for(lambda: not self._readers)
            self._steps += 1

    def end(self) -> None:
        """The step is over, or was left out."""
        with self._changed:
            self._steps = max(0, self._steps - 1)
            self._changed.notify_all()

    @contextmanager
    def still(self, seconds: float) -> Iterator[None]:
        """No step is made within. Raises CommTimeout where one takes longer than `seconds`."""
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
