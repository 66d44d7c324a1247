"""Hosts and places: how they are named, and who gets which."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
from harness.patience import PATIENCE

from dadt.config import Config
from dadt.errors import ConfigError
from dadt.launch.agents import Agents
from dadt.launch.hosts.host import Host, choose, parse, read
from dadt.launch.hosts.slot import HostRoom, place, share_out
from dadt.launch.start.plan import make
from dadt_cli.run.dry import describe


def test_hosts_as_users_write_them():
    assert parse("host1:2,me@host2, [::1]:2,10.0.0.7,u@[fe80::1%eth0],[fe80::1%br-lan]") == [
        Host(name="host1", slots=2),
        Host(name="host2", user="me"),
        Host(name="::1", slots=2),
        Host(name="10.0.0.7"),
        Host(name="fe80::1%eth0", user="u"),
        Host(name="fe80::1%br-lan"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("host1:two", "'host1:two' is no host"),
        ("host1:0", "a host needs 1 slot or more"),
        ("a,,b", "'' is no host"),
        ("a:2,b,a", "a stands there twice; name each host once, as a:2"),
        ("fe80::1", "'fe80::1' is no host; give hosts as host1:2,user@host2:2,[::1]:2"),
        ("a b", "'a b' is no host"),
        ("-oProxyCommand=x", "is no host"),
    ],
)
def test_what_is_no_host_is_refused(text, said):
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert said in str(error.value)


def test_a_hostfile_may_hold_comments_and_blank_lines(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\n\nhost1 slots=4\nme@host2:2   # fast\n  [::1]\n")
    assert read(path) == [Host(name="host1", slots=4), Host(name="host2", user="me", slots=2), Host(name="::1")]


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("b\na\nb\n", {"b": 2, "a": 1}),  # $PBS_NODEFILE
        ("a slots=2\nb\na\na:4\n", {"a": 7, "b": 1}),
        ("a slots=2 max_slots=4\nb max-slots=3\nc\n", {"a": 2, "b": 3, "c": 0}),  # Open MPI's
        ("a max_slots=2\na max_slots=2\n", {"a": 4}),
    ],
)
def test_a_hostfile_of_another_launcher(tmp_path, text, slots):
    path = tmp_path / "hosts"
    path.write_text(text)
    assert [(host.name, host.slots) for host in read(path)] == list(slots.items())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("u@a\nb\nv@a\n", "a stands there with two users; give one"),
        ("a slots=4 max_slots=2\n", "line 1: slots=4 is more than max_slots=2"),
        ("a max_slots=2 max-slots=2\n", "line 1: 'max-slots=2' is not understood"),
        ("a slot=2\n", "line 1: 'slot=2' is not understood; a line is `host slots=N`"),
        ("\na slots=0\n", "line 2: a host needs 1 slot or more"),
        ("a:2 slots=2\n", "line 1: 'slots=2' is not understood"),
        ("# none\n", "names no host"),
    ],
)
def test_a_hostfile_with_a_mistake_is_refused_with_its_line(tmp_path, text, said):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read(path)
    assert said in str(error.value)


def in_proportion(work: Callable[[int], None]) -> bool:
    """Whether work(n) for ten times as many takes ten times as long, give or take: what grows with the square takes up
    to a hundred times as long. Without the garbage collector, which takes the longer the more objects there are."""

    def seconds(count: int) -> float:
        begin = time.thread_time()
        work(count)
        return time.thread_time() - begin

    gc.disable()
    try:
        work(100)  # imports
        return min(seconds(20_000) for _ in range(2)) < 30 * min(seconds(2_000) for _ in range(5))
    finally:
        gc.enable()


def test_as_many_hosts_as_there_are_anywhere_are_read_at_once(tmp_path):
    def work(count: int) -> None:
        names = [f"host{number}" for number in range(count)]
        (tmp_path / "hosts").write_text("".join(f"{name} slots=2\n" for name in names))
        hosts = read(tmp_path / "hosts")
        assert parse(",".join(names)) == [replace(host, slots=0) for host in hosts]
        assert choose(hosts, ",".join(names), "host0") == hosts[1:]
        slots = place([2] * count, [HostRoom(host=name) for name in names], names)
        assert len(slots) == 2 * count

    assert in_proportion(work)


def test_a_hostfile_without_end_is_refused():
    with pytest.raises(ConfigError, match="--hostfile /dev/zero: has more than 16384 KiB"):
        read(Path("/dev/zero"))


def test_a_hostfile_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "none")


def test_include_and_exclude():
    hosts = parse("a,b,c")
    assert [each.name for each in choose(hosts, "a,c", "")] == ["a", "c"]
    assert [each.name for each in choose(hosts, "", "b")] == ["a", "c"]
    with pytest.raises(ConfigError, match="--exclude d: d is not among the hosts a, b, c"):
        choose(hosts, "", "d")
    with pytest.raises(ConfigError, match="leave no host"):
        choose(hosts, "a", "a")


def rooms(*slots: int) -> list[HostRoom]:
    return [HostRoom(host=f"h{index}", slots=each, cores=8) for index, each in enumerate(slots)]


@pytest.mark.parametrize(
    ("count", "slots", "shares"),
    [(2, (4, 4), [2, 0]), (5, (4, 4), [4, 1]), (0, (2, 3), [2, 3]), (8, (4, 4), [4, 4]), (1, (1, 1), [1, 0])],
)
def test_never_more_or_fewer_workers_than_asked_for(count, slots, shares):
    assert share_out(count, rooms(*slots)) == shares


def test_too_few_slots_are_named():
    with pytest.raises(ConfigError, match=r"-np 9: the hosts have 8 slots \(h0:4, h1:4\)"):
        share_out(9, rooms(4, 4))


def test_a_host_without_slots_has_one_for_each_gpu():
    assert share_out(0, [HostRoom(host="a", gpus=["0", "1"]), HostRoom(host="b")]) == [2, 1]
    with pytest.raises(ConfigError, match="3 workers on a: only 2 GPUs are visible"):
        share_out(3, [HostRoom(host="a", slots=3, gpus=["0", "1"])])


def test_a_gpu_is_not_given_out_twice_where_its_machine_has_two_names():
    both = [HostRoom(host=name, slots=2, gpus=["0", "1"], machine="m") for name in ("localhost", "127.0.0.1")]
    with pytest.raises(ConfigError, match=r"localhost and 127.0.0.1 are one machine, and both would use its GPU 0"):
        share_out(4, both)
    assert share_out(2, both) == [2, 0]
    assert share_out(2, [replace(both[0], gpus=["0"], slots=1), replace(both[1], gpus=["1"], slots=1)]) == [1, 1]
    assert share_out(4, [both[0], replace(both[1], machine="n")]) == [2, 2]


def test_ranks_go_host_by_host():
    slots = place(
        [2, 1], [HostRoom(host="a", gpus=["GPU-x", "3"], cores=8), HostRoom(host="b", cores=1)], ["10.0.0.1", "fd::2"]
    )
    assert [(s.rank, s.host, s.local_rank, s.local_size, s.cross_rank) for s in slots] == [
        (0, "a", 0, 2, 0),
        (1, "a", 1, 2, 0),
        (2, "b", 0, 1, 1),
    ]
    assert [s.gpu for s in slots] == ["GPU-x", "3", None]
    assert [s.threads for s in slots] == [4, 4, 1]
    assert [s.address for s in slots] == ["10.0.0.1", "10.0.0.1", "fd::2"]
    assert {s.world_size for s in slots} == {3}


def test_a_long_hostfile_takes_time_in_proportion_to_its_length(tmp_path):
    def work(count: int) -> None:
        (tmp_path / "hosts").write_text("".join(f"host{n} slots=2\n" for n in range(count)))
        config = Config(hostfile=str(tmp_path / "hosts"))
        assert len(describe(make(config, ["python", "train.py"]))) > 2 * count

    assert in_proportion(work)


class Unanswered:
    """Starts agents of which none ever comes."""

    extends = False

    def launch(self, hosts):
        return [Future() for _ in hosts]

    def close(self):
        pass


def test_a_thousand_hosts_that_never_come_are_given_up_at_once():
    agents = Agents(Unanswered(), [Host(name=f"host{n}") for n in range(1000)], 10.0)
    closing = threading.Thread(target=agents.close, args=(0.0,), daemon=True)
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive(), "each one given up wakes a loop that does not turn any more"
