"""Memory of operations under way lives, though everybody has let go of it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness.patience import PATIENCE

from dadt import _core
from dadt.comm.collectives import operation as verb
from dadt.comm.collectives.named import Named
from dadt.comm.collectives.ordered import OrderedGroup
from dadt.comm.executors.base import Connection
from dadt.comm.executors.point_to_point import NoPointToPoint
from dadt.comm.keepalive import KeepAlive
from dadt.config import Config
from dadt.errors import Aborted
from dadt.world import World

SUBMITTERS: dict[str, Callable[[Connection], Any]] = {
    "group": lambda connection: OrderedGroup(connection, 0, 1),
    "named": lambda connection: Named(connection, Config(), World(), lambda key, blob: [blob]),
}


class Operation:
    def __init__(self, done: bool = False) -> None:
        self.done = done


class Memory:
    """Whose end can be seen."""


@pytest.fixture(params=SUBMITTERS)
def engine_and_submit(request: pytest.FixtureRequest) -> Any:
    """An engine whose operations the test runs, and what submits an allreduce of an array to it."""
    engine = _core.Engine(None, 0, 1, 30.0)
    among = SUBMITTERS[request.param](Connection(engine, NoPointToPoint(), lambda: None))

    def submit(array: np.ndarray, name: str) -> Any:
        tensor = torch.from_numpy(array)
        call = verb.all_reduce(tensor, tensor, "sum", 1)
        return among.submit(call, name) if request.param == "named" else among.submit(call)

    yield engine, submit, among
    if engine.error is None:
        among.close(30.0)


def pulled(engine: _core.Engine) -> Any:
    job = engine.pull(30.0)
    assert job is not None
    return job


def test_what_is_done_is_let_go(engine_and_submit):
    engine, submit, _ = engine_and_submit
    array = np.ones(8, dtype=np.float32)
    memory = weakref.ref(array)
    handle = submit(array, "first")
    del array
    job = pulled(engine)
    assert memory() is not None
    job.finish([b""], 1.0, 0.0, 0.0)
    handle.wait(PATIENCE)
    submit(np.ones(1, dtype=np.float32), "second")
    pulled(engine).finish([b""], 1.0, 0.0, 0.0)
    del job, handle
    gc.collect()
    assert memory() is None


def test_what_fails_while_a_library_is_in_it_is_kept(engine_and_submit):
    engine, submit, among = engine_and_submit
    array = np.ones(8, dtype=np.float32)
    memory = weakref.ref(array)
    handle = submit(array, "first")
    del array
    job = pulled(engine)
    among.abort("given up")
    with pytest.raises(Aborted):
        handle.wait(PATIENCE)
    later = submit(np.ones(1, dtype=np.float32), "second")
    with pytest.raises(Aborted):
        later.wait(PATIENCE)
    among.close(30.0)
    del handle, later, among, job
    gc.collect()
    assert memory() is not None


def test_what_is_done_does_not_wait_for_long_behind_what_is_not():
    kept = KeepAlive(lambda: False)
    kept.add(Operation(), "the first of all")
    memories = []
    for _ in range(1000):
        memory = Memory()
        memories.append(weakref.ref(memory))
        kept.add(Operation(done=True), memory)
    del memory
    assert sum(each() is not None for each in memories) < 100


def test_threads_let_go_of_nothing_that_is_not_done():
    kept = KeepAlive(lambda: False)
    pending: list[Any] = []

    def add() -> None:
        for i in range(3000):
            memory = Memory()
            operation = Operation(done=i % 3 > 0)
            kept.add(operation, memory)
            if not operation.done:
                pending.append(weakref.ref(memory))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pending) == 4000
    assert all(each() is not None for each in pending)
