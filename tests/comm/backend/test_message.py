"""Messages between two ranks: send, recv, isend, irecv, from any source, in batches, and lists of objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.backend_ranks import Ranks, group

_groups: dict[str, Any] = {}


def _group(executor: str) -> Any:
    if executor not in _groups:
        _groups[executor] = group(executor)
    return _groups[executor]


def pass_round(executor: str) -> None:
    """A ring, as the tutorials of torch.distributed have it; strided, empty and large tensors."""
    among = _group(executor)
    rank, n = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % n, (rank - 1) % n
    for shape in [(), (0,), (7,), (400_000,)]:
        mine, received = torch.full(shape, float(rank)), torch.full(shape, -1.0)
        sending = dist.isend(mine, after, group=among)
        dist.recv(received, before, group=among)
        sending.wait()
        assert received.eq(before).all() and sending.is_completed()
    square, target = torch.arange(6.0).view(2, 3).t() + rank, torch.zeros(3, 2).t().contiguous().t()
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, square, after, among), dist.P2POp(dist.irecv, target, before, among)]
    )
    for work in works:
        work.wait()
    assert target.equal(torch.arange(6.0).view(2, 3).t() + before)


def ring_sum(executor: str) -> None:
    """All-reduce by hand."""
    among = _group(executor)
    rank, n = dist.get_rank(), dist.get_world_size()
    moving = torch.full((1000,), float(rank))
    total, received = moving.clone(), torch.empty_like(moving)
    for _ in range(n - 1):
        sending = dist.isend(moving, (rank + 1) % n, group=among)
        dist.recv(received, (rank - 1) % n, group=among)
        sending.wait()
        moving = received.clone()
        total += moving
    assert total.eq(sum(range(n))).all()


def by_tag_and_from_any(executor: str) -> None:
    among = _group(executor)
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank:
        for sending in [dist.isend(torch.tensor([10 * rank + tag]), 0, group=among, tag=tag) for tag in (5, 6)]:
            sending.wait()
        return
    later = {peer: torch.zeros(1, dtype=torch.int64) for peer in range(1, n)}
    for peer, tensor in later.items():
        dist.recv(tensor, peer, group=among, tag=6)
        assert tensor.item() == 10 * peer + 6
    seen = set()
    for _ in range(1, n):
        tensor = torch.zeros(1, dtype=torch.int64)
        source = dist.recv(tensor, None, group=among, tag=5)
        assert tensor.item() == 10 * source + 5
        seen.add(source)
    assert seen == set(range(1, n))


def objects(executor: str) -> None:
    among = _group(executor)
    found = [None, None]
    if dist.get_rank() == 1:
        dist.send_object_list([{"a": 1}, "b"], 0, group=among)
    elif dist.get_rank() == 0:
        dist.recv_object_list(found, 1, group=among)
        assert found == [{"a": 1}, "b"]


def futures(executor: str) -> None:
    """What hangs on one may wait for another, and none waits for one that was asked for before it."""
    among, rank, tensors = _group(executor), dist.get_rank(), [torch.ones(2), torch.ones(2)]

    def again(_: Any) -> Any:
        return dist.all_reduce(tensors[1], group=among, async_op=True).get_future().wait()

    first = dist.all_reduce(tensors[0], group=among, async_op=True).get_future().then(again)
    assert first.wait()[0].tolist() == [dist.get_world_size()] * 2
    if rank == 0:
        late, early = (dist.irecv(tensors[tag], 1, among, tag).get_future() for tag in range(2))
        early.wait()
        dist.send(torch.ones(1), 1, among, tag=2)
        late.wait()
    elif rank == 1:
        dist.send(tensors[1], 0, among, tag=1)
        dist.recv(torch.ones(1), 0, among, tag=2)
        dist.send(tensors[0], 0, among, tag=0)


@pytest.mark.parametrize(
    "body", [futures, pass_round, ring_sum, by_tag_and_from_any, objects], ids=lambda body: body.__name__
)
@pytest.mark.parametrize("executor", ["auto", "gloo"])
def test_messages(four: Ranks, executor: str, body: Any) -> None:
    four.run(body, executor)
