"""Hosts that come and go: who names them, which of them are left alone for a while, and what a job makes of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.patience import PATIENCE, await_that
from harness.run import DADT, Run

from dadt.config import Config
from dadt.errors import ConfigError
from dadt.launch.hosts import script
from dadt.launch.hosts.candidates import SERVED_SECONDS, Candidates
from dadt.launch.hosts.discovery import Discovery
from dadt.launch.hosts.host import Host
from dadt.launch.hosts.reader import HostReader, Read
from dadt.launch.members.node import END_SECONDS, Node
from dadt.launch.start import plan

TRAIN = """
import hashlib, os, time, torch
torch.set_num_threads(1)
rank, restarts = os.environ["DADT_RANK"], os.environ["DADT_RESTARTS"]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(30):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).pow(2).mean().backward()
    optimizer.step()
    if step == 10 and restarts == "0":
        with open(f"ready{rank}", "w") as file:
            file.write(str(os.getppid()))
        while not os.path.exists("go"): time.sleep(0.01)
print("weights", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""


def write_script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def names(hosts: Sequence[Host]) -> list[str]:
    return [host.name for host in hosts]


class Known:
    """What is known of the hosts, who asks for them, and the warnings of that."""

    def __init__(self, hosts: Sequence[Host], read: Read | None) -> None:
        self.said: list[str] = []
        self.discovery = Discovery(hosts, time.monotonic(), changes=read is not None)
        self.reader = HostReader(self.discovery, read, self.said.append)
        self.candidates = self.discovery.candidates

    def settle(self) -> None:
        """Ask, and await the answer."""
        begin = time.monotonic()

        def answered() -> bool:
            self.reader.poll(0.0)
            return self.discovery.answered >= begin

        await_that(answered, "an answer")


# The script -----------------------------------------------------------------------------------------------------------


def test_a_script_prints_a_host_a_line(tmp_path: Path) -> None:
    path = write_script(tmp_path / "hosts", "printf '# ours\\nh0:2\\n\\nme@h1\\nh2 slots=3\\n'")
    assert script.hosts(path) == [
        Host(name="h0", slots=2),
        Host(name="h1", user="me"),
        Host(name="h2", slots=3),
    ]
    assert script.hosts(write_script(tmp_path / "none", "exit 0")) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo h0; echo h1:two", "hosts, its line 2: 'h1:two' is no host"),
        ("echo h0; echo h0", "hosts, its: h0 stands there twice"),
        ("echo one; echo down with it >&2; exit 3", "hosts: ended with code 3: down with it"),
        ("yes", "hosts: prints more than 16384 KiB, which is no list of hosts"),
        ("kill -9 $$", "hosts: ended with code -9"),
    ],
)
def test_a_script_with_a_mistake_is_told_of(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        script.hosts(write_script(tmp_path / "hosts", text))
    assert said in str(error.value)


def test_a_script_that_hangs_is_ended_with_what_it_has_started(tmp_path: Path, monkeypatch) -> None:
    written = tmp_path / "pid"
    path = write_script(tmp_path / "hosts", f"sleep 600 & echo $! >{written}; echo localhost; wait")

    def now() -> float:
        """Once it hangs its time is over; what it prints before wakes its reader, who looks at the clock."""
        return time.monotonic() + (PATIENCE if written.exists() and written.read_text() else 0)

    monkeypatch.setattr(script, "SECONDS", PATIENCE)
    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=now))
    with pytest.raises(ConfigError, match=rf"hosts: took longer than {PATIENCE:g} s"):
        script.hosts(path)
    pid = int(written.read_text())
    await_that(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text(), "its end")


def test_a_script_that_cannot_be_run(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("h0\n")
    with pytest.raises(ConfigError, match=r"hosts: cannot be run \(Permission denied\); it has to be an executable"):
        script.hosts(path)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"hosts": "h0"}, "--host-discovery-script and -H or --hostfile exclude each other: give one"),
        ({"hostfile": "f"}, "--host-discovery-script and -H or --hostfile exclude each other: give one"),
        ({"launcher": "slurm"}, "--host-discovery-script: --launcher slurm has hosts of its own"),
        ({"launcher": "mpi"}, "--host-discovery-script: --launcher mpi has hosts of its own"),
        ({"nnodes": 2}, "--host-discovery-script: --nnodes has hosts of its own"),
    ],
)
def test_where_a_script_makes_no_sense(knobs: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config(np=2, host_discovery_script="hosts.sh", **knobs)
    assert said in str(error.value)


def test_filters_and_slots_apply_to_what_is_there(tmp_path: Path) -> None:
    path = write_script(tmp_path / "hosts", f"cat {tmp_path}/list")
    (tmp_path / "list").write_text("h0\nh1:4\nh2\n")
    config = Config(np=2, host_discovery_script=str(path), exclude="h0,away", accelerators=2)
    assert plan.hosts_of(config, {}) == [Host(name="h1", slots=4), Host(name="h2", slots=2)]
    (tmp_path / "list").write_text("h0\n")
    assert plan.hosts_now(config) == []


# Which hosts there are ------------------------------------------------------------------------------------------------


def test_hosts_that_change(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("h0\nh1\n")
    config = Config(np=2, hostfile=str(path))
    known = Known(plan.hosts_of(config, {}), plan.who_names_hosts(config))
    path.write_text("h0\nh2\n")
    assert names(known.candidates.usable(time.monotonic())) == ["h0", "h1"]
    known.settle()
    assert names(known.candidates.usable(time.monotonic())) == ["h0", "h2"]
    bad = tmp_path / "bad"
    bad.write_text("h0 h1\n")
    bad.rename(path)
    for _ in range(2):
        known.settle()
        assert names(known.candidates.hosts) == ["h0", "h2"]
    assert len(known.said) == 1
    assert known.said[0].endswith(
        "line 1: 'h1' is not understood; a line is `host slots=N`: the hosts stay as they were"
    )


def test_asking_blocks_nobody(tmp_path: Path) -> None:
    path = write_script(tmp_path / "hosts", f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; echo h1")
    known = Known([Host(name="h0")], lambda: script.hosts(path))
    known.reader.poll(0.0)
    assert names(known.candidates.hosts) == ["h0"]
    (tmp_path / "go").touch()
    known.settle()
    assert names(known.candidates.hosts) == ["h1"]


def test_hosts_of_the_command_line_do_not_change() -> None:
    config = Config(np=2, hosts="h0,h1")
    known = Known(plan.hosts_of(config, {}), plan.who_names_hosts(config))
    known.reader.poll(0.0)
    assert names(known.candidates.hosts) == ["h0", "h1"]
    assert known.discovery.answered == float("inf")


def test_each_host_that_fails_is_left_alone_for_longer() -> None:
    now = 1000.0
    one, other = Host(name="h0"), Host(name="h1")
    known = Candidates([one, other])
    assert known.due(now) == float("inf")
    for pause in (1, 2, 4, 8, 16, 30, 30):
        known.failed(one, now)
        known.failed(one, now)  # it is known
        assert known.usable(now) == [other]
        assert known.due(now) == pause
        now += pause
        assert known.usable(now) == [one, other]
    known.served([one], now)
    now += SERVED_SECONDS + 1
    known.failed(one, now)
    assert known.due(now) == 1
    now += 1
    known.served([one], now)
    now += SERVED_SECONDS - 1
    known.failed(one, now)
    assert known.due(now) == 2


def test_a_host_whose_agent_is_cut_off_is_left_alone_until_that_has_ended_its_workers() -> None:
    node = Node(0, Host(name="h0"), heard=100.0)
    known = Candidates([node.host])
    known.failed(node.host, 108.0, node.busy_until(30.0))
    assert known.due(108.0) == 30.0 + END_SECONDS - 8.0
    node.closed = True
    assert node.busy_until(30.0) == 0.0


def test_nobody_knows_which_host_failed() -> None:
    one, other = Host(name="h0"), Host(name="h1")
    known = Candidates([one, other])
    known.failed(one, 5.0)
    known.blame([one, other], 5.0)
    assert known.usable(5.0) == [other]
    known = Candidates([one, other])
    known.blame([one, other], 5.0)
    assert known.usable(5.0) == []


# Jobs -----------------------------------------------------------------------------------------------------------------


def begin(start: Callable[..., Run], folder: Path, listed: str, *options: str) -> Run:
    (folder / "list").write_text(listed)
    path = write_script(folder / "hosts", f"cat {folder}/list")
    return start(TRAIN, "--host-discovery-script", str(path), "--files", "all", *options, "train.py")


def dadt(*arguments: str) -> str:
    return subprocess.run([*DADT, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=True).stdout


def check_replicas(out: bytes, count: int) -> None:
    weights = re.findall(r"weights (\w+)", out.decode())
    assert len(weights) == count
    assert len(set(weights)) == 1


def test_a_job_waits_for_hosts_that_are_not_there_yet(start, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    run = begin(start, tmp_path, "localhost:1\n", "-np", "2", "--start-timeout", "100")  # pauses: 1, 2, 4, 8 s ...
    assert run.process.stderr is not None
    waiting = b"dadt: waiting for hosts: localhost with room for 1 workers of 2\n"
    assert run.process.stderr.readline() == waiting
    row = next(line for line in dadt("ps").splitlines() if line.startswith(run.job))
    assert re.fullmatch(rf"{run.job}  \S+ +- +- +waiting for hosts +train.py +\S+", row)
    assert dadt("ps", run.job) == f"job {run.job}: waiting for hosts\n"
    (tmp_path / "list").write_text("localhost:1\n127.0.0.1:1\n")
    result = run.finish()
    assert result.code == 0, result.err
    assert "2 workers on 2 hosts" in result.err
    check_replicas(result.out, 2)


@pytest.mark.slow
def test_a_job_begins_with_as_many_as_fit(start, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    result = begin(start, tmp_path, "localhost:2\n", "-np", "3", "--min-np", "2").finish()
    assert result.code == 0, result.err
    assert "dadt: warning: the hosts have room for 2 of 3 workers: training begins with these\n" in result.err
    check_replicas(result.out, 2)


def test_a_job_that_waits_can_be_killed(start, tmp_path: Path) -> None:
    run = begin(start, tmp_path, "localhost:1\n", "-np", "2", "--start-timeout", "60")
    assert run.process.stderr is not None
    assert run.process.stderr.readline().startswith(b"dadt: waiting for hosts: ")
    assert dadt("kill", run.job) == f"job {run.job} has ended: nothing of it ran any more\n"
    result = run.finish()
    assert (result.code, result.err) == (143, "dadt: ended by SIGTERM; nothing was started\n")


def test_too_few_hosts_come_in_time(start, tmp_path: Path) -> None:
    result = begin(start, tmp_path, "", "-np", "2", "--start-timeout", "1").finish()
    assert result.code == 124, result.err
    assert result.err == "dadt: no host for 2 workers after --start-timeout 1 s\n"


def test_a_script_that_fails_at_the_start(start, tmp_path: Path) -> None:
    result = begin(start, tmp_path, "h0:x\n", "-np", "2").finish()
    assert result.code == 2
    assert "'h0:x' is no host" in result.err and result.err.count("\n") == 1


@pytest.mark.slow
def test_a_restart_takes_the_hosts_of_the_hostfile_as_it_is_then(start, tmp_path: Path) -> None:
    """The last answer that could be read holds: what is written there in the end is no list."""
    path = tmp_path / "hosts"
    path.write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    run = start(TRAIN, "-np", "2", "--hostfile", str(path), "--max-restarts", "1", "--files", "all", "train.py")
    run.wait_for("ready0")
    [agent] = run.wait_for("ready1")
    path.write_text("[::1] slots=2\n")
    os.kill(agent, signal.SIGKILL)
    result = run.finish()
    assert result.code == 0, result.err
    assert re.search(r"127\.0\.0\.1: the agent of this host \(pid \d+\) was killed by signal 9", result.err)
    assert ": restart 1 of 1\n" in result.err
    assert "dadt: 2 workers on ::1" in result.err
    check_replicas(result.out, 2)


@pytest.mark.slow
def test_a_hostfile_that_cannot_be_read_again_ends_nothing(start, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    run = start(TRAIN, "-np", "2", "--hostfile", str(path), "--max-restarts", "1", "--files", "all", "train.py")
    run.wait_for("ready0")
    [agent] = run.wait_for("ready1")
    path.unlink()
    os.kill(agent, signal.SIGKILL)
    result = run.finish()
    assert result.code == 0, result.err
    assert "hosts: cannot be read (No such file or directory): the hosts stay as they were\n" in result.err
    check_replicas(result.out, 2)
