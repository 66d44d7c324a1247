"""`dadt run` called by hand on hosts between which there is no SSH."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.machine import Machine, Network
from harness.patience import PATIENCE, await_that
from harness.run import await_end_of, write_script

TRAIN = """
import os, torch
torch.manual_seed(int(os.environ["RANK"]))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("master", os.environ["MASTER_ADDR"], "weights", model.weight.sum().item(), flush=True)
"""
SLEEP = """
import os, pathlib, subprocess, time
subprocess.Popen(["setsid", "sleep", "613"])
pathlib.Path("up" + os.environ["RANK"]).touch()
time.sleep(600)
"""
SECRET = "what only the nodes of this job know"
Node = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def node(hosts: Callable[[int], Network], tmp_path: Path) -> Iterator[Node]:
    """node(machine, rank, where, script, *more) -> its `dadt run`. Ends before the machines do."""
    started: list[subprocess.Popen[str]] = []

    def begin(machine: Machine, rank: int, where: str, script: str, *more: str) -> subprocess.Popen[str]:
        dadt = write_script(tmp_path, script)
        flags = ["--nnodes", "2", "--node-rank", str(rank), "--rendezvous", where, "-np", "2", *more]
        command = machine.enter([*dadt, "run", *flags, "train.py"], tmp_path)
        started.append(
            subprocess.Popen(
                command,
                env={**os.environ, "HOME": str(machine.home), "DADT_SECRET": SECRET},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield begin
    for each in started:
        each.kill()
        each.communicate(timeout=PATIENCE)


@pytest.mark.parametrize("where", [pytest.param("h0:29400", marks=pytest.mark.slow), "[fd07::1]:29400", "file"])
def test_hosts_without_ssh_train_together(
    hosts: Callable[[int], Network], node: Node, tmp_path: Path, where: str
) -> None:
    network = hosts(2)
    where = f"file://{tmp_path}/meet" if where == "file" else where
    second, first = (node(network[rank], rank, where, TRAIN) for rank in (1, 0))
    (out, err), (_, said) = first.communicate(timeout=PATIENCE), second.communicate(timeout=PATIENCE)
    assert (first.returncode, second.returncode) == (0, 0), err + said
    found = re.findall(r"^\[(\d) node(\d)\] master (\S+) weights (\S+)$", out, re.M)
    assert sorted(line[:2] for line in found) == [("0", "0"), ("1", "1")], out
    assert len({line[2:] for line in found}) == 1
    assert found[0][2] in (network[0].address, network[0].address6)
    assert re.match(r"dadt: node 1 of job \w{4} at \S+\ndadt: done in ", said)


def weights(first: subprocess.Popen[str], second: subprocess.Popen[str], seconds: float = PATIENCE) -> set[str]:
    """What both ranks have trained."""
    (out, err), (_, said) = (each.communicate(timeout=seconds) for each in (first, second))
    assert (first.returncode, second.returncode) == (0, 0), err + said
    return set(re.findall(r" weights (\S+)$", out, re.MULTILINE))


@pytest.mark.slow
def test_hosts_that_have_ipv6_alone_train_together(hosts: Callable[[int], Network], node: Node) -> None:
    network = hosts(2)
    for host in network.hosts:
        host.run(*["ip", "-4", "addr", "flush", "dev", "eth0"])
    assert len(weights(*(node(network[rank], rank, "[fd07::1]:29400", TRAIN) for rank in (0, 1)))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("late", ["host", "rank"])
@pytest.mark.timeout(600)
def test_starts_that_are_minutes_apart(hosts: Callable[[int], Network], node: Node, late: str) -> None:
    network = hosts(2)
    nap = "import os, time\nif os.environ['RANK'] == '1': time.sleep(150)\n" if late == "rank" else ""
    flags = "--start-timeout", "400"
    first = node(network[0], 0, "h0:29400", nap + TRAIN, *flags)
    if late == "host":
        time.sleep(150)
    assert len(weights(first, node(network[1], 1, "h0:29400", nap + TRAIN, *flags), 4 * PATIENCE)) == 1


@pytest.mark.slow
def test_a_cut_network_ends_the_job_on_both_sides(hosts: Callable[[int], Network], node: Node, tmp_path: Path) -> None:
    network = hosts(2)
    first, second = (node(network[rank], rank, "h0:29400", SLEEP, "--orphan-timeout", "2") for rank in (0, 1))
    await_that(lambda: (tmp_path / "up0").exists() and (tmp_path / "up1").exists(), "the workers")
    network.cut(network[1])
    begin = time.monotonic()
    _, err = first.communicate(timeout=PATIENCE)
    assert first.returncode == 3
    assert re.search(r"dadt: node1: .*all its workers were stopped", err), err
    _, said = second.communicate(timeout=PATIENCE)
    assert second.returncode == 3
    assert said.splitlines()[-1] == "dadt: node0 is gone, without a word on how the job ended"
    assert time.monotonic() - begin < 20.0
    await_that(lambda: not network.leftovers(), "the end of all that ran there")


def test_an_agent_that_was_killed_is_told_everywhere(
    hosts: Callable[[int], Network], node: Node, tmp_path: Path
) -> None:
    network = hosts(2)
    first, second = (node(network[rank], rank, "h0:29400", SLEEP) for rank in (0, 1))
    await_that(lambda: (tmp_path / "up0").exists() and (tmp_path / "up1").exists(), "the workers")
    (agent,) = (pid for pid, command in network[1].processes().items() if command.endswith("-m dadt.launch.agent"))
    os.kill(agent, 9)
    (_, err), (_, said) = first.communicate(timeout=PATIENCE), second.communicate(timeout=PATIENCE)
    assert (first.returncode, second.returncode) == (3, 3)
    for text in (err, said):
        assert "node1: the connection was closed; all its workers were stopped" in text
    await_end_of(agent)
