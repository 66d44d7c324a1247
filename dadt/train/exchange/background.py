"""Runs Python computations between two operations of the C++ engine, on a separate thread, in the order of these
operations."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from dadt._core import Engine, Work
from dadt.comm.executors.device import Averaging
from dadt.errors import CommError, CommTimeout

_PATIENCE = 60.0  # seconds after which a wait checks whether the C++ engine has failed
_END_SECONDS = 5.0

Wait = Callable[["Work | Averaging"], None]


class Background:
    """Runs computations on one thread, which is started when first needed. If the C++ engine fails or a computation
    raises an error, the thread ends.

    Each operation that the thread releases already has its place in the engine's order, so the order is equal on all
    ranks, however late a thread runs.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls: queue.SimpleQueue[tuple[int, Callable[[Wait], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, call: Callable[[Wait], None]) -> None:
        """Run `call(wait)` on the background thread, after all earlier calls. `wait(work)` returns when the operation
        `work` is done. Only the training thread calls this method."""
        if self._thread is None:
            # The thread is a daemon, so that waiting for a peer that never answers does not keep the process from
            # exiting.
            self._thread = threading.Thread(target=self._run, name="dadt-background", daemon=True)
            self._thread.start()
        self._calls.put((torch.get_num_threads(), call))

    def close(self) -> bool:
        """Stop the thread; call this method after the C++ engine is closed. Returns whether the thread has ended."""
        if self._thread is None:
            return True
        self._calls.put(None)
        self._thread.join(_END_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (next_ := self._calls.get()) is not None:
            threads, call = next_
            try:
                if threads != torch.get_num_threads():
                    torch.set_num_threads(threads)  # the last bits of a matrix product depend on the number of threads
                call(self._wait)
            except CommError:
                return  # the training thread receives the C++ engine's error when it waits for a later operation
            except Exception as error:  # noqa: BLE001 (the training thread waits for what this was to release)
                self._engine.abort(f"computing between two allreduces failed: {type(error).__name__}: {error}")
                return
            del next_, call  # drops the last references, so that the memory can be used again

    def _wait(self, work: Work | Averaging) -> None:
        while True:
            try:
                work.wait(_PATIENCE)
                return
            except CommTimeout:
                if self._engine.error is not None:
                    raise
