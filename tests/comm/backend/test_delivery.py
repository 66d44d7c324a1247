"""Handles of operations under way: who is told of an error, and what several threads that wait for one get."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness.patience import PATIENCE
from torch import distributed

from dadt import _core
from dadt.comm.backend.rendezvous import GroupRendezvous
from dadt.comm.backend.work import BackendWork, PendingWorks
from dadt.comm.collectives.operation import Operation
from dadt.comm.collectives.ordered import Pending


@pytest.fixture
def engine():
    engine = _core.Engine(_core.NullExecutor(0, 1), 0, 1, 10.0)
    yield engine
    engine.close(10.0)


def test_an_error_is_raised_where_its_operation_is_waited_for(engine) -> None:
    deliveries = PendingWorks(GroupRendezvous(distributed.HashStore(), 0, 1, 10.0), "")

    def delivery(finish: Callable[[], object]) -> BackendWork:
        work = engine.allgather(b"", "bytes")
        work.wait(PATIENCE)
        return BackendWork(deliveries, "allgather", 1, [(work, finish)], [], 10.0)

    def fail() -> None:
        raise RuntimeError("this result cannot be copied")

    failing = deliveries.add(delivery(fail))
    assert deliveries.add(delivery(lambda: None)).wait()
    assert failing.is_completed() and not failing.is_success()
    with pytest.raises(RuntimeError, match="this result cannot be copied"):
        failing.wait()


def test_threads_that_wait_for_one_handle_get_one_result(engine) -> None:
    waiting, made = threading.Barrier(3), []

    def finish(_: object) -> object:
        assert not made
        with pytest.raises(threading.BrokenBarrierError):
            waiting.wait(0.2)  # others have the time to come here, too, if they can
        made.append(object())
        return made[0]

    call = Operation("all_gather", "all_gather bytes", "exchange")
    call.finish = finish
    pending = Pending(engine.allgather(b"", "bytes"), call)
    with ThreadPoolExecutor(3) as pool:
        results = [each.result() for each in [pool.submit(pending.wait, 10.0) for _ in range(3)]]
    assert results == made * 3
