"""Between two steps another thread may read what a rank trains, where ranks train apart and wait for nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dadt.errors import CommTimeout


class Pause:
    """The training thread calls `pass_by` and `rest`, another one `still`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wanted = 0
        self._resting = False

    def pass_by(self) -> None:
        """A step is over. Waits while another thread reads."""
        if self._wanted:
            with self.rest():
                pass

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Nothing is trained within: this thread waits for others."""
        with self._changed:
            self._resting = True
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._changed.wait_for(lambda: not self._wanted)
                self._resting = False

    @contextmanager
    def still(self, seconds: float) -> Iterator[None]:
        """Nothing is trained within. Raises CommTimeout where no step ends in so many seconds."""
        with self._changed:
            self._wanted += 1
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: self._resting, seconds):
                    raise CommTimeout(f"this rank made no step in {seconds:g} s, in which another one could read it")
            yield
        finally:
            with self._changed:
                self._wanted -= 1
                self._changed.notify_all()
