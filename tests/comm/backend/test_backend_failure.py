"""What ranks are told when others do not come, do something else, or die. Each case has a group of its own."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.backend_ranks import Ranks, group

from dadt.errors import StartTimeout

PATIENCE = 1.0
MADE = 4.0
"""The timeout of a group that limits its start as well: long enough for ranks that have met."""
LONG = 60.0


def _told(action: Any) -> str:
    with pytest.raises(dist.DistError) as told:
        action()
    return str(told.value)


def all_but_one(executor: str, verb: str, absent: int, limit: str) -> tuple[str, float] | None:
    """What a rank was told, and after how many seconds. limit: whose timeout it is: "made" is the one with which the
    group was made, "set" one that it was given later, and "own" the operation's own."""
    dist.barrier()  # none is late for the group, whose timeout is also that of its start
    among = group(executor, timeout=MADE if limit == "made" else LONG)
    if limit == "set":
        among.set_timeout(timedelta(seconds=PATIENCE))
    rank = dist.get_rank()
    told = None
    if rank != absent:
        timeout = timedelta(seconds=PATIENCE) if limit == "own" else None
        actions = {
            "barrier": lambda: dist.barrier(among, timeout=timeout),
            "all_reduce": lambda: dist.all_reduce(torch.ones(100_000), group=among),
            "wait": lambda: dist.all_reduce(torch.ones(3), group=among, async_op=True).wait(timeout),
            "future": lambda: dist.all_reduce(torch.ones(3), group=among, async_op=True).get_future().wait(),
        }
        began = time.monotonic()
        text = _told(actions[verb]) if verb != "future" else _told_by_future(actions[verb])
        told = text, time.monotonic() - began
    dist.barrier()
    dist.destroy_process_group(among)
    return told


def _told_by_future(action: Any) -> str:
    with pytest.raises(RuntimeError) as told:
        action()
    return str(told.value)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("executor", "verb", "limit"),
    [
        ("auto", "barrier", "made"),
        ("auto", "barrier", "own"),
        ("auto", "wait", "own"),
        ("auto", "future", "set"),
        ("gloo", "all_reduce", "set"),
        ("gloo", "barrier", "own"),
        ("gloo", "all_reduce", "made"),
    ],
)
def test_who_does_not_come_is_named(four: Ranks, executor: str, verb: str, limit: str) -> None:
    told = four.run(all_but_one, executor, verb, 2, limit)
    assert told[2] is None
    for each, _ in (told[0], told[1], told[3]):
        assert "rank 2" in each and "dadt: " in each, each
    # The first to give up tells the others, which may have begun later.
    waited = max(seconds for _, seconds in (told[0], told[1], told[3]))
    assert 0.9 * (MADE if limit == "made" else PATIENCE) < waited < LONG / 2


def absent_from_the_start() -> str | None:
    if dist.get_rank() == 0:
        return None
    with pytest.raises(StartTimeout) as told:
        dist.new_group([0, 1], timedelta(seconds=PATIENCE), "dadt", use_local_synchronization=True)
    return str(told.value)


def test_who_does_not_join_is_named(two: Ranks) -> None:
    told = two.run(absent_from_the_start)[1]
    assert "rank 0 did not join the process group within 1 s" in told


def another_size() -> str:
    among = group()
    told = _told(lambda: dist.all_reduce(torch.ones(4 + dist.get_rank()), group=among))
    dist.destroy_process_group(among)
    return told


def test_another_size_is_told_on_both_sides(two: Ranks) -> None:
    for told in two.run(another_size):
        assert "float32 [4]" in told and "float32 [5]" in told, told


def wrong_use() -> None:
    with pytest.raises(ValueError, match="2 elements"):
        dist.group.WORLD._allgather_base(torch.empty(3), torch.empty(2))
    with pytest.raises(TypeError, match="mean of bool"):
        dist.all_reduce(torch.tensor([True]), dist.ReduceOp.AVG)
    with pytest.raises(ValueError, match="rows cannot be split equally between 2 ranks"):
        dist.all_to_all_single(torch.empty(3), torch.empty(3))
    with pytest.raises(ValueError, match="no options of its own"):
        dist.new_group(backend="dadt", pg_options=object())
    with pytest.raises(ValueError, match="takes tags from 0 to"):
        dist.send(torch.ones(1), 1 - dist.get_rank(), tag=1 << 30)
    dist.barrier()  # and the group is as good as before


def test_wrong_use_is_told_before_anything_is_sent(two: Ranks) -> None:
    two.run(wrong_use)


def in_a_fork(executor: str) -> None:
    """A child (a DataLoader's worker) inherits the group, and must neither hang nor disturb it."""
    among, peer = group(executor, timeout=60), 1 - dist.get_rank()
    pid = os.fork()
    if pid == 0:
        refused = 0
        for action in (
            lambda: dist.all_reduce(torch.ones(2), group=among),
            lambda: dist.send(torch.ones(2), peer, among),
            lambda: dist.recv(torch.ones(2), peer, among),
        ):
            try:
                action()
            except RuntimeError as error:
                refused += "belongs to the parent process" in str(error)
        among.shutdown()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=among)
    assert tensor.tolist() == [2, 2]
    dist.destroy_process_group(among)


@pytest.mark.parametrize("executor", ["auto", "gloo"])
def test_a_forked_child_is_no_rank(two: Ranks, executor: str) -> None:
    two.run(in_a_fork, executor)


def within_a_group() -> str | None:
    among, told = dist.new_group([2, 3], timedelta(seconds=60), "dadt"), None
    if dist.get_rank() == 2:
        work = dist.all_reduce(torch.ones(2), group=among, async_op=True)
        told = _told(lambda: work.wait(timedelta(seconds=PATIENCE)))
    dist.barrier()
    if dist.get_rank() >= 2:
        dist.destroy_process_group(among)
    return told


def test_ranks_of_a_group_of_some_are_said_to_be_its_own(four: Ranks) -> None:
    told = four.run(within_a_group)[2]
    assert "rank 1 did not come" in told and told.endswith("(ranks counted within the group of ranks 2, 3)"), told


def again() -> None:
    """Groups come and go; nothing of one is taken for another's."""
    for round in range(5):
        among = group("auto")
        tensor = torch.tensor([round + dist.get_rank()])
        work = dist.all_reduce(tensor, group=among, async_op=True)
        future = work.get_future()
        dist.destroy_process_group(among)  # ends what is pending in order
        assert future.wait()[0].item() == 2 * round + 1


def test_groups_come_and_go(two: Ranks) -> None:
    two.run(again)
