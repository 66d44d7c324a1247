"""Messages between ranks of one host, as Python sees them. The core's own tests have the rest."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from harness.patience import PATIENCE

from dadt import _core
from dadt.comm.executors.point_to_point import CoreMessages, NoPointToPoint
from dadt.errors import Aborted, CommTimeout, Mismatch, PeerLost

LONG = 100_000
"""Elements that do not go at once."""


@pytest.fixture
def mails() -> Iterator[list[CoreMessages]]:
    """Those of two ranks, both in this process."""
    boxes = [_core.Mailbox(rank, 2) for rank in (0, 1)]
    endpoints = [box.endpoint() for box in boxes]
    threads = [threading.Thread(target=box.connect, args=(endpoints, 30)) for box in boxes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mails = [CoreMessages(box) for box in boxes]
    yield mails
    for mail in mails:
        mail.close()


@pytest.mark.parametrize("count", [0, 7, LONG])
def test_a_tensor_arrives(mails, count):
    sent = torch.arange(count, dtype=torch.float64)
    got = torch.zeros(count, dtype=torch.float64)
    receive = mails[1].receive(got, None, 3)
    mails[0].send(sent, 1, 3).wait(PATIENCE)
    receive.wait(PATIENCE)
    assert receive.done and receive.source == 0
    assert torch.equal(got, sent)


def test_memory_lives_though_nobody_keeps_the_tensor(mails):
    mails[0].send(torch.full((LONG,), 7.0), 1)
    gc.collect()
    torch.full((LONG,), 1.0)  # takes the place, if that is free
    got = torch.empty(LONG)
    mails[1].receive(got, 0).wait(PATIENCE)
    assert bool((got == 7).all())


def test_a_wait_that_is_too_long_names_the_rank_and_may_go_on(mails):
    got = torch.zeros(3)
    receive = mails[1].receive(got, 0, 4)
    with pytest.raises(RuntimeError, match="call wait"):
        _ = receive.source
    with pytest.raises(CommTimeout, match=r"rank 0 did not send a message with tag 4 within 0\.05 s"):
        receive.wait(0.05)
    mails[0].send(torch.ones(3), 1, 4)
    receive.wait(PATIENCE)
    assert got.tolist() == [1, 1, 1]


def test_lengths_that_differ_are_an_error_on_both_sides(mails):
    send = mails[0].send(torch.zeros(LONG), 1)
    receive = mails[1].receive(torch.zeros(LONG + 1), 0)
    for transit in (send, receive):
        with pytest.raises(Mismatch, match=rf"rank 0 sends .* {4 * LONG} bytes .* which expects {4 * LONG + 4}"):
            transit.wait(PATIENCE)


def test_the_end_of_either_side_ends_the_wait(mails):
    mine, other = mails[0].receive(torch.zeros(1), 1), mails[1].receive(torch.zeros(1), 0)
    mails[1].close()
    with pytest.raises(Aborted, match="closed"):
        other.wait(PATIENCE)
    with pytest.raises(PeerLost, match=r"rank 1 .* has ended"):
        mine.wait(PATIENCE)
    with pytest.raises(PeerLost, match="closed"):
        mails[1].send(torch.zeros(1), 0)


def test_a_rank_that_is_none_is_refused(mails):
    with pytest.raises(ValueError, match="rank 2 of 2"):
        mails[0].send(torch.zeros(1), 2)


def test_no_mail_moves_nothing():
    tensor = torch.ones(3)
    send, receive = NoPointToPoint().send(tensor, 1), NoPointToPoint().receive(tensor, 2)
    send.wait(0)
    receive.wait(0)
    assert send.done and receive.done and receive.source == 2
    assert tensor.tolist() == [1, 1, 1]
