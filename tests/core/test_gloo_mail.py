"""Messages over Gloo, which ends what nobody keeps, and all connections with a wait that times out."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore

from dadt.errors import CommTimeout, Mismatch
from dadt.executors import c10d


def both(action: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(action, (0, 1)))


@pytest.fixture
def connected(tmp_path: Path) -> Callable[[float], list[c10d.C10d]]:
    """Two ranks, both in this process, of a group with a timeout."""

    def connect(timeout: float) -> list[c10d.C10d]:
        def make(rank: int) -> c10d.C10d:
            group = c10d.gloo_group(FileStore(str(tmp_path / "store"), 2), "127.0.0.1", rank, 2, timeout)
            return c10d.C10d("gloo", group, rank, 2)

        return both(make)

    return connect


def test_a_message_arrives_though_nobody_keeps_its_handle(connected):
    mails = connected(30.0)
    mails[0].send(torch.full((100_000,), 7.0), 1, 5)
    gc.collect()
    got = torch.zeros(100_000)
    mails[1].receive(got, 0, 5).wait(30)
    assert bool((got == 7).all())


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
    receive.wait(30)
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
        wrong.wait(30)
    right.wait(30)
    for send in sends:
        send.wait(30)
    assert got.tolist() == [2.0] * 5 and right.source == 0
