"""Executors by name: which ones there are, what `auto` picks, what is refused, and who makes what of a failure."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from harness.executor_rank import main
from harness.ranks import Ended, printed

from dadt.config import Config
from dadt.config.executor import HostWorkers, choose
from dadt.errors import ConfigError


@pytest.mark.parametrize(
    ("workers", "gpus", "picked", "why"),
    [
        ([2], 0, "shm", "one host"),
        ([2], 1, "shm", "one host"),
        ([2, 2], 0, "hierarchical:tcp", "2 hosts with 2 workers each"),
        ([3, 1], 0, "hierarchical:tcp", "2 hosts with 1 to 3 workers each"),
        ([1, 1, 1], 0, "tcp", "3 hosts with one worker each"),
        ([2, 1], 2, "nccl", "a GPU of its own"),
    ],
)
def test_auto_is_chosen_by_the_hosts_and_says_why(workers, gpus, picked, why):
    places = [HostWorkers(f"h{number}", count, gpus) for number, count in enumerate(workers)]
    config, reason = choose(Config(broadcast_executor="gloo"), places)
    assert (config.executor, config.broadcast_executor) == (picked, "gloo")
    assert why in reason and (picked == "gloo" or "the other as you have chosen" in reason)
    config, reason = choose(Config(), places)
    assert config.executor == picked
    assert reason.startswith(f"executor {picked}: ") and why in reason


def test_one_worker_needs_none():
    one = choose(Config(), [HostWorkers("", 1, 0)])
    assert one == (Config(executor="null"), "no executor: there is one worker")
    assert choose(Config(np=2, min_np=1), [HostWorkers("", 1, 0)])[0].executor == "null"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"executor": "shm"}, "--executor shm: works on one host only"),
        ({"broadcast_executor": "shm"}, "--broadcast-executor shm: works on one host only"),
        ({"executor": "nccl"}, "--executor nccl: h1 has 1 NVIDIA GPUs for 2 workers"),
        ({"allreduce_executor": "mpicuda"}, "--allreduce-executor mpicuda: h1 has 1 NVIDIA GPUs"),
    ],
)
def test_what_does_not_fit_the_hosts_is_refused(flags, says):
    with pytest.raises(ConfigError, match=says):
        choose(Config(**flags), [HostWorkers("h0", 2, 2), HostWorkers("h1", 2, 1)])


@pytest.mark.parametrize("name", ["shm", "c10d:ours", "hierarchical", "hierarchical:mpi", "hierarchical:c10d:ours"])
def test_names(name):
    assert Config(executor=name, allreduce_executor=name).executor == name


@pytest.mark.parametrize(
    "name", ["", "udp", "c10d:", "hierarchical:shm", "hierarchical:", "hierarchical:c10d:", "shm:"]
)
def test_other_names_are_refused_with_a_list_of_those_there_are(name):
    with pytest.raises(ConfigError, match=r"--executor .*: unknown; choose one of auto, shm, .*hierarchical:<tcp"):
        Config(executor=name)


def ranks(folder: Path, executor: str, hosts: str, what: str) -> list[Ended]:
    """Of executor_rank.py: `hosts` says on which host each is, as "0011"."""
    return printed(folder, main, *((executor, hosts, rank, str(folder), what) for rank in range(len(hosts))))


@pytest.mark.parametrize(
    ("executor", "hosts"),
    [
        ("tcp", "012"),
        ("c10d:ours", "00"),
        ("hierarchical:tcp", "0120"),
        ("hierarchical:gloo", "0011"),
        ("hierarchical:gloo", "0120"),
        ("hierarchical:c10d:ours", "0001"),
        ("nccl's way", "00"),
    ],
)
def test_sums_are_right_and_the_same_on_all_ranks(executor, hosts, tmp_path):
    said = [rank.said for rank in ranks(tmp_path, executor, hosts, "sums")]
    assert all(text.startswith("right ") for text in said), said
    assert len(set(said)) == 1, said


def test_two_executors(tmp_path):
    said = [rank.said for rank in ranks(tmp_path, "gloo+shm", "00", "sums")]
    assert all(text.startswith("right ") for text in said), said


@pytest.mark.parametrize(
    ("executor", "says"),
    [
        ("c10d:nothing", "executor c10d:nothing: torch .* has no such backend, only gloo"),
        ("c10d:mpi", "executor c10d:mpi: cannot be used through torch.distributed"),
        ("hierarchical:c10d:nothing", "executor c10d:nothing: torch"),
    ],
)
def test_what_torch_does_not_have_is_refused_before_anything_is_exchanged(executor, says, tmp_path):
    (rank,) = ranks(tmp_path, executor, "0", "sums")
    assert re.search(f"ConfigError: {says}", rank.said), rank.said


@pytest.mark.parametrize("dies", ["1", "3"])
def test_a_rank_that_dies_ends_the_wait_of_all_others(dies, tmp_path):
    ended = ranks(tmp_path, "hierarchical:gloo", "0011", f"dies {dies}")
    assert ended.pop(int(dies)).code == -signal.SIGKILL
    said = [rank.said for rank in ended]
    assert all("CommError" in text or "PeerLost" in text for text in said), said
    near = said[0 if dies == "1" else 2]
    assert f"rank {dies}" in near, near
