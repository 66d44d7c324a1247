"""Work handles that the process group returns to torch.distributed, and the thread that completes their futures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.futures import Future

from dadt.comm.backend.rendezvous import GroupRendezvous
from dadt.comm.keepalive import Waited
from dadt.comm.waiters import Waiters
from dadt.errors import CommError, CommTimeout
from dadt.world import ranked

PATIENCE = 1.0
"""Seconds of waiting after which a rank publishes in which call it waits, so that error texts can name the missing
ranks."""
LONG = 1e8
"""Seconds that stand for "no limit", because the executor's own deadline ends any wait earlier."""


Transfer = tuple[Waited, "Callable[[], object] | None"]
"""A collective or a message to wait for, and the function that copies its result to the caller's tensor (None: nothing
to copy)."""


class BackendWork(Work):
    """torch's Work for one call of a collective, or for one message. Any thread may wait for it."""

    def __init__(
        self, owner: PendingWorks, what: str, number: int, parcels: Sequence[Transfer], outputs: list[Any], limit: float
    ) -> None:
        """number: sequence number of the group's call, 0 for a message. limit: seconds to wait; 0 or less leaves the
        limit to the executor."""
        super().__init__()
        self._owner = owner
        self._what = what
        self._number = number
        self._parcels = list(parcels)
        self._outputs = outputs
        self._limit = limit
        self._lock = threading.RLock()  # must be reentrant: callbacks of the future may use this work handle again
        self._settled = False
        self._error: BaseException | None = None
        self._future: Future[Any] | None = None

    @classmethod
    def of(cls, owner: PendingWorks, several: Sequence[BackendWork], limit: float) -> BackendWork:
        """Return one work handle that is done when all work handles in `several` are done. limit: seconds to wait; 0 or
        less leaves the limit to the executor."""
        parcels = [parcel for each in several for parcel in each._parcels]
        outputs = [output for each in several for output in each._outputs]
        number = max((each._number for each in several), default=0)
        return owner.add(cls(owner, "coalesced operations", number, parcels, outputs, limit))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the results are in the output tensors. Raises DistBackendError, whose text names the ranks that
        are missing."""
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        with self._lock:
            self._settle(seconds if seconds > 0 else self._limit)
            self._fulfil(self._error)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if self._settled:
            return True
        if not all(waitable.done for waitable, _ in self._parcels):
            return False
        with self._lock:
            self._settle(0.0)
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Any]:
        return self._outputs

    def source_rank(self) -> int:
        """Return the rank that sent the received tensor."""
        return int(self._parcels[0][0].source)  # type: ignore[attr-defined]

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return a future of the list of results. A background thread completes the future, or this call does if the
        results are ready."""
        with self._lock:
            if self._future is None:
                self._future = Future()
                if self._settled:
                    self._fulfil(self._error)
                else:
                    self._owner.complete_later(self)
            return self._future

    def complete(self) -> None:
        """Wait for the operation, then complete its future with the results or the error."""
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 (it is raised where the future is waited for)
            with self._lock:
                self._fulfil(error)

    def _fulfil(self, error: BaseException | None) -> None:
        """Complete the future with the results or `error`, unless it is complete or was never requested. The caller
        holds the lock."""
        if self._future is None or self._future.done():
            return
        if error is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._outputs)

    def _settle(self, limit: float) -> None:
        """Wait for the transfers and copy their results to the outputs, or store their error. The caller holds the
        lock. limit: seconds to wait; 0 or less: no limit."""
        if self._settled:
            return
        deadline = time.monotonic() + (limit if limit > 0 else LONG)
        try:
            for waitable, finish in self._parcels:
                self._await(waitable, deadline)
                if finish is not None:
                    finish()
        except CommError as error:
            failure = dist.DistBackendError(f"dadt: {self._what}: {self._owner.explained(error, self._number)}")
            failure.__cause__ = error
            if isinstance(error, CommTimeout) and not all(waitable.done for waitable, _ in self._parcels):
                raise failure from error  # only this wait has timed out; the operation itself still runs
            self._error = failure
        except Exception as error:  # noqa: BLE001 (it is raised where this one is waited for, whoever looks first)
            self._error = error
        self._settled = True
        self._owner.discard(self)

    def _await(self, waitable: Waited, deadline: float) -> None:
        left = deadline - time.monotonic()
        if self._number:
            try:
                waitable.wait(min(PATIENCE, left / 2))
                return
            except CommTimeout:
                # The operation has either finished just now or failed at its own deadline; wait(0) raises the error of
                # a failed operation.
                if waitable.done:
                    waitable.wait(0.0)
                    return
            self._owner.announce(self._number)
            left = deadline - time.monotonic()
        waitable.wait(max(left, 0.0))


class PendingWorks:
    """All unfinished operations of one process group, whether or not a caller waits for them."""

    def __init__(self, meeting: GroupRendezvous, whose: str) -> None:
        """whose: appended to error texts that name ranks, to say how the ranks are counted; empty if the group spans
        the whole job."""
        self._meeting = meeting
        self._whose = whose
        self._flying: set[BackendWork] = set()
        self._waiters = Waiters("dadt-futures")

    def add(self, delivery: BackendWork) -> BackendWork:
        """Keep the work handle and the tensors it reads and writes alive until the operation is done. Returns the
        handle."""
        self._flying.add(delivery)
        for each in list(self._flying):
            each.is_completed()
        return delivery

    def discard(self, delivery: BackendWork) -> None:
        self._flying.discard(delivery)

    def complete_later(self, delivery: BackendWork) -> None:
        """Complete the work's future in a separate Python thread, because the C++ core's threads never take the GIL,
        and because the callback of one future may wait for another future."""
        self._waiters.run(delivery.complete)

    def announce(self, number: int) -> None:
        self._meeting.wait_in(number)

    def explained(self, error: CommError, number: int) -> str:
        """Return the error's text, extended by the ranks that are missing from call `number` if the executor did not
        name any."""
        text = str(error)
        if number and "rank" not in text:
            self.announce(number)
            missing = self._meeting.absent(number)
            text = f"{ranked(missing)} did not come to it ({text})" if missing else text
        return text + self._whose if "rank" in text else text

    def close(self, timeout: float) -> None:
        """End the threads that complete futures; call after the group is closed, when no operation is pending."""
        self._waiters.close(timeout)
