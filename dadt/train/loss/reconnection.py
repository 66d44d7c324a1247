"""Reconnects a rank with its peers on a background thread while the rank trains, for algorithms whose ranks do not wait
for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dadt.comm.peer_deaths import Deaths
from dadt.errors import CommError, PeerLost
from dadt.train.loss.pause import Pause

_STOP_SECONDS = 5.0


class Reconnection:
    """Reconnects one rank in the background. `begin` runs on the thread that learns of lost ranks, all other methods on
    the training thread.

    Operations that the training thread runs together with all ranks, such as the last average, fail meanwhile. The
    training thread begins them again inside the same `within` block.
    """

    def __init__(self, deaths: Deaths, connect_anew: Callable[[CommError], None], most: float) -> None:
        """connect_anew: function that takes the error of the old connection, and connects with the remaining ranks or
        raises the error. most: maximum number of seconds that connecting may take."""
        self._deaths = deaths
        self._connect_anew = connect_anew
        self._most = most
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failure: CommError | None = None
        """The connection's error, if it failed although no rank is known to be lost."""
        self._error: Exception | None = None
        self._closed = False
        self._count = 0
        """Number of times that this rank has reconnected."""
        self._within: int | None = None
        """Value of `_count` when the training thread entered the context `within`, or None outside of this context."""
        self.pause = Pause()

    def begin(self, failure: CommError | None = None) -> None:
        """Start to reconnect, without waiting. failure: the connection's error, if no rank is known to be lost."""
        with self._changed:
            there_is_need = failure is not None or self._deaths.outdated
            if self._thread is None and there_is_need and not self._closed:
                self._failure = failure
                self._thread = threading.Thread(target=self._run, name="dadt-reconnection", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        done = False
        while not done:
            error, self._failure = self._failure or PeerLost("ranks have ended"), None
            try:
                self._connect_anew(error)
            except Exception as found:  # noqa: BLE001 (raised on the training thread)
                self._error = found
            with self._changed:  # both change under one lock, so that no thread sees `_thread` gone and an old `_count`
                self._count += self._error is None
                done = self._error is not None or not self._deaths.outdated
                if done:
                    self._thread = None
                    self._changed.notify_all()

    def check(self) -> None:
        """Raise the error that ended reconnecting, or PeerLost if the training thread must repeat an operation with all
        ranks."""
        if self._error is not None:
            raise self._error
        with self._changed:
            thread = self._thread
            outdated = thread is not None or self._within != self._count
        if self._within is not None and outdated and thread is not threading.current_thread():
            raise PeerLost("ranks have ended")

    @contextmanager
    def within(self) -> Iterator[None]:
        """Context of an operation that the training thread runs together with all ranks."""
        outer, self._within = self._within, self._count
        try:
            yield
        finally:
            self._within = outer

    def wait(self, error: CommError) -> None:
        """Wait until an operation with all ranks, which has failed with `error`, can begin again. Raises the error if
        it cannot."""
        before = self._within
        if self._count == before:
            self.begin(error)
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None, self._most)
        if self._error is not None:
            raise self._error
        if self._thread is not None or self._count == before:
            raise error
        self._within = self._count

    def close(self) -> None:
        """Start no further reconnecting, and wait at most _STOP_SECONDS for one under way. Does nothing if called
        again."""
        with self._changed:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join(_STOP_SECONDS)
