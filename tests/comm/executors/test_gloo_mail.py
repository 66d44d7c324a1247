"""Messages over Gloo, which ends what nobody keeps, and all connections with a wait that times out."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.patience import PATIENCE
from torch.distributed import FileStore

from dadt import _core
from dadt.comm.executors import c10d
from dadt.comm.executors.base import Connection
from dadt.comm.executors.device import Device
from dadt.errors import CommTimeout, Mismatch, PeerLost


def both(action: Callable[[int], Any], ranks: int = 2) -> list[Any]:
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(action, range(ranks)))


@pytest.fixture
def connected(tmp_path: Path) -> Callable[..., list[c10d.C10d]]:
    """Ranks, all in this process, of a group with a timeout."""

    def connect(timeout: float, ranks: int = 2) -> list[c10d.C10d]:
        def make(rank: int) -> c10d.C10d:
            group = c10d.gloo_group(FileStore(str(tmp_path / "store"), ranks), "127.0.0.1", rank, ranks, timeout)
            return c10d.C10d("gloo", group, rank, ranks)

        return both(make, ranks)

    return connect


def test_its_threads_do_not_interrupt_one_that_computes(connected):
    def threads() -> dict[int, tuple[str, int]]:
        found = {}
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # a thread that another test has left has ended meanwhile
                found[int(task.name)] = (task / "comm").read_text().strip(), os.sched_getscheduler(int(task.name))
        return found

    before = threads()  # of which those that other tests have left may be of either kind
    mails = connected(30.0, 1)
    after = threads()
    gloo = {policy for thread, (name, policy) in after.items() if "gloo" in name and thread not in before}
    assert gloo == {os.SCHED_BATCH}
    assert all(after[thread][1] == policy for thread, (_, policy) in before.items() if thread in after)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    mails[0].close()


def test_a_message_arrives_though_nobody_keeps_its_handle(connected):
    mails = connected(30.0)
    mails[0].send(torch.full((100_000,), 7.0), 1, 5)
    gc.collect()
    got = torch.zeros(100_000)
    mails[1].receive(got, 0, 5).wait(PATIENCE)
    assert bool((got == 7).all())


@pytest.mark.slow
def test_a_message_that_is_looked_at_may_come_later_than_the_groups_timeout(connected):
    timeout = 3.0
    mails = connected(timeout)
    got, begun = torch.zeros(4), time.monotonic()
    receive = mails[1].receive(got, 0, 8)
    while time.monotonic() < begun + 1.3 * timeout:
        assert not receive.done
        with pytest.raises(CommTimeout):
            receive.wait(0.1)
    tensors = [torch.ones(4), torch.ones(4)]
    both(lambda rank: mails[rank].allreduce(tensors[rank], "sum"))
    assert all(tensor.tolist() == [2.0] * 4 for tensor in tensors)
    mails[0].send(torch.ones(4), 1, 8)
    receive.wait(PATIENCE)
    assert receive.done
    assert got.tolist() == [1.0] * 4


@pytest.mark.parametrize(("sent", "expected"), [(3, 4), (4, 3), (0, 2), (2, 0), (100_000, 7)])
def test_a_message_of_another_length_is_an_error_and_the_next_one_arrives(connected, sent: int, expected: int):
    mails = connected(30.0)
    sends = [mails[0].send(torch.ones(sent), 1, 6), mails[0].send(torch.full((5,), 2.0), 1, 6)]
    wrong = mails[1].receive(torch.zeros(expected), 0, 6)
    got = torch.zeros(5)
    right = mails[1].receive(got, None, 6)
    with pytest.raises(Mismatch, match=f"rank 0 sent a message of {4 * sent} bytes, and .* has {4 * expected}"):
        wrong.wait(PATIENCE)
    right.wait(PATIENCE)
    for send in sends:
        send.wait(PATIENCE)
    assert got.tolist() == [2.0] * 5 and right.source == 0


def test_an_abort_ends_waits_for_others_than_the_rank_that_is_gone(connected):
    """Whose connection fails at once, so that no wait for it times out and closes the others."""
    mails = connected(60.0, 3)
    receive = mails[0].receive(torch.zeros(4), 2, 3)
    mails[1].close()  # the next of rank 0
    begun = time.monotonic()
    with pytest.raises(RuntimeError):
        mails[0].broadcast(torch.zeros(4), 1)
    mails[0].abort()
    with pytest.raises((PeerLost, CommTimeout)):
        receive.wait(PATIENCE)
    assert time.monotonic() - begun < 20


def test_an_abort_ends_what_waits_in_the_executor_of_a_device(connected, tmp_path: Path):
    """A script that waits for its GPU does not look at the engine. Here Gloo is NCCL, and the CPU the GPU."""
    mails = connected(60.0)
    engine = _core.Engine(None, 0, 2, 60.0)
    device = Device(mails[0], engine, torch.device("cpu"), 0, 2)
    alone = c10d.gloo_group(FileStore(str(tmp_path / "alone"), 1), "127.0.0.1", 0, 1, 60.0)
    connection = Connection(engine, c10d.C10d("gloo", alone, 0, 1), lambda: None, device=device)
    flat = torch.zeros(4)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(device.average, [torch.ones(4)], [flat], flat, name="step 0", weight=1.0, lane=b"")
        with pytest.raises(TimeoutError):
            waits.result(0.5)  # rank 1 does not come
        begun = time.monotonic()
        connection.abort("rank 1 is gone", lost=True)
        with pytest.raises(RuntimeError):
            waits.result(30)
    assert time.monotonic() - begun < 20
    connection.engine.close(5.0)
