"""Hosts come into a running job in the place of lost ones: under gossip, and where scripts are made again."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch
from harness.host_run import HostRun
from harness.patience import await_that
from harness.run import Result
from harness.sharded import SHARDED

TRAIN = """
import os, re, subprocess, sys, time, torch
from pathlib import Path
torch.set_num_threads(1)
environment = open("/proc/self/environ").read()
rank, joins = re.search("DADT_RANK=([0-9]+)", environment)[1], "DADT_JOINS=1" in environment
torch.manual_seed(joins)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
step = 0
while joins or len(list(Path().glob("joined*"))) < int(sys.argv[1]):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(4, (8,))).backward()
    if joins and step == 0:
        print("joins at", float(model[0].weight.mean()))
    optimizer.step()
    with torch.no_grad():
        if not joins:
            model[0].weight += 1.0 - model[0].weight.mean()  # by which its weights are known
    step += 1
    if step == 20:
        torch.save(rank, "saved.pt")
        with open("log", "a") as file:
            file.write(rank)
        subprocess.run(["touch", f"joined{rank}" if joins else "ready"], check=True)  # kept apart otherwise
    time.sleep(0.03)
print("ends after", step)
"""
OPTIONS = ("--min-np", "2", "--algorithm", "gossip", "--executor", "tcp", "--output", "all", "--orphan-timeout", "4")


def read_until(run: HostRun, text: str) -> None:
    told = []
    assert run.process.stderr is not None
    while not any(text in line for line in told):
        line = run.process.stderr.readline().decode()
        assert line, told
        told.append(line)


def joined(result) -> set[int]:
    assert result.code == 0, result.err
    told = re.findall(rb"\[(\d)[^]]*\] joins at ([\d.]+)", result.out)
    assert all(float(mean) == pytest.approx(1.0, abs=0.05) for _, mean in told), result.out
    return {int(rank) for rank, _ in told}


def ended(result) -> set[int]:
    return {int(rank) for rank in re.findall(rb"\[(\d)[^]]*\] ends after", result.out)}


def test_a_spare_host_takes_the_place_of_one_without_power(hosts, start, tmp_path) -> None:
    network = hosts(3)
    options = ("-np", "4", "-H", network.list(2), *OPTIONS)
    run = start(network, TRAIN, *options, "train.py", "2")
    await_that((tmp_path / "ready").exists, "20 steps")
    network.cut(network[1])
    result = run.finish()
    assert "h2 not used: 4 workers fit on the other hosts" in result.err
    assert "h1: no sign of life for 4 s: training goes on without it" in result.err
    assert "h2 joins: new workers start there in place of ranks 2 and 3" in result.err
    assert joined(result) == {2, 3}
    assert ended(result) == {0, 1}
    assert (torch.load(tmp_path / "saved.pt"), (tmp_path / "log").read_text()) == ("0", "0"), "all see one folder"


def assert_same_end(result: Result, ranks: set[bytes]) -> None:
    """Assert that these ranks, and no others, have told the same last step and the same weights."""
    told = re.findall(rb"\[(\d)[^]]*\] ends at (\d+ [-\d.e]+)", result.out)
    assert {rank for rank, _ in told} == ranks and len({end for _, end in told}) == 1, result.out


@pytest.mark.slow
def test_a_host_that_is_back_takes_its_own_place(hosts, start, tmp_path) -> None:
    network = hosts(2)
    run = start(network, TRAIN, "-np", "2", "-H", network.list(1), *OPTIONS[2:], "--min-np", "1", "train.py", "1")
    await_that((tmp_path / "ready").exists, "20 steps")
    agent = min(pid for pid, command in network[0].processes().items() if "dadt.launch.agent" in command)
    os.kill(agent, signal.SIGKILL)
    result = run.finish()
    assert "h0 joins: new workers start there in place of rank 0" in result.err
    assert joined(result) == {0}
    assert ended(result) == {1}
    assert (tmp_path / "log").read_text() in ("0", "01"), "the new rank 0 writes nothing where rank 1 does"


@pytest.mark.slow
def test_a_host_that_the_others_do_not_reach_is_left_out(hosts, start, tmp_path) -> None:
    network = hosts(3)
    run = start(network, TRAIN, "-np", "2", "-H", network.list(1), *OPTIONS[2:], "--min-np", "1", "train.py", "1")
    await_that((tmp_path / "ready").exists, "20 steps")
    network.divide(network[0], network[2])
    network.cut(network[1])
    read_until(run, "h2: not all other hosts")
    (tmp_path / "joined by none").touch()
    result = run.finish()
    assert result.code == 0, result.err
    assert joined(result) == set()
    assert ended(result) == {0}


@pytest.mark.slow
def test_a_host_with_which_the_others_cannot_connect_is_left_out_again(hosts, start, tmp_path) -> None:
    network = hosts(3)
    options = ("-np", "2", "-H", network.list(1), *OPTIONS[2:], "--min-np", "1", "--timeout", "5")
    run = start(network, TRAIN, *options, "--heartbeat-timeout", "60", "train.py", "1")
    await_that((tmp_path / "ready").exists, "20 steps")
    network.cut(network[1])
    read_until(run, "h2 joins")
    network.divide(network[0], network[2])
    read_until(run, "since rank 1 joined, connecting fails: training goes on without it")
    network.heal(network[0])
    network.heal(network[2])
    result = run.finish()
    assert result.code == 0, result.err
    assert ended(result) == {0}


REPLAYED = """
import glob, os, subprocess, time, torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
model = torch.nn.Sequential(torch.nn.Linear(16, 600), torch.nn.BatchNorm1d(600), torch.nn.Linear(600, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
joins = os.environ.get("DADT_JOINS") == "1"
step = end = 0
while not end or step < end:
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        step += 1
        if not joins:
            time.sleep(0.02)  # the fewer steps the new worker has to make again
        if step == 20:
            open("ready", "w").close()
        if step % 10 == 0 and os.path.exists("end"):
            end = int(open("end").read())
        if end and step >= end:
            break
        looks = step % 10 == 0 and os.environ["DADT_RANK"] == "1" and not end
        if looks and ' "join"' in open(glob.glob("dadt-logs/*/events.jsonl")[0]).read():
            subprocess.run(f"echo {step + 20} > half && mv half end", shell=True, check=True)
print("ends at", step, float(model[0].weight.double().sum()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["tcp", "hierarchical"])
def test_a_host_that_is_back_comes_to_where_the_others_are(hosts, start, tmp_path, executor: str) -> None:
    """Under pipe its script is made again."""
    network = hosts(2)
    options = ["-np", "2", "-H", network.list(1), "--min-np", "1", "--executor", executor, "--orphan-timeout", "4"]
    run = start(network, REPLAYED, *options, "--snapshot-every", "1000steps", "--output", "all", "train.py")
    await_that((tmp_path / "ready").exists, "20 steps")
    agent = min(pid for pid, command in network[0].processes().items() if "dadt.launch.agent" in command)
    os.kill(agent, signal.SIGKILL)
    result = run.finish()
    assert result.code == 0, result.err
    assert "h0 joins: new workers start there in place of rank 0" in result.err
    assert_same_end(result, {b"0", b"1"})


@pytest.mark.slow
def test_no_worker_starts_on_a_host_that_is_cut_off(hosts, start, tmp_path) -> None:
    """The others would wait in vain for it to join."""
    network = hosts(2)
    options = ["-np", "2", "-H", network.list(1), "--min-np", "1", "--timeout", "5", "--heartbeat-timeout", "2"]
    run = start(network, REPLAYED, *options, "--snapshot-every", "1000steps", "--output", "all", "train.py")
    await_that((tmp_path / "ready").exists, "20 steps")
    network.divide(network[0], network[1])
    read_until(run, "training goes on without it")
    time.sleep(4.0)  # it would start after 1 s
    assert not any("train.py" in command for command in network[1].processes().values())
    network.heal(network[0])
    network.heal(network[1])
    read_until(run, "a new worker starts in place of rank 1")
    result = run.finish()
    assert result.code == 0, result.err
    assert_same_end(result, {b"0", b"1"})


SHARDING = f"""{SHARDED}
import glob, subprocess
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
step = end = 0
while not end or step < end:
    drawn = torch.Generator().manual_seed(100 * step + number)
    optimizer.zero_grad()
    model(torch.randn(4, 8, generator=drawn)).pow(2).mean().backward()
    optimizer.step()
    step += 1
    if step == 20 and number == 0:
        open("ready", "w").close()
    if step % 10 == 0 and os.path.exists("end"):
        end = int(open("end").read())
    if step % 10 == 0 and number == 0 and not end:
        if open(glob.glob("dadt-logs/*/events.jsonl")[0]).read().count(' "join"') == 2:
            subprocess.run(f"echo {{step + 20}} > half && mv half end", shell=True, check=True)
print("ends at", step, sum(p.detach().full_tensor().double().sum().item() for p in model.parameters()))
"""


@pytest.mark.slow
def test_a_spare_host_takes_the_place_of_one_that_was_an_island(hosts, start, tmp_path) -> None:
    """Its ranks meet at an address of the new host, and get their parts from those of the other island."""
    network = hosts(3)
    options = ["-np", "4", "-H", network.list(2), "--island", "host", "--min-np", "1", "--orphan-timeout", "4"]
    run = start(network, SHARDING, *options, "--snapshot-every", "1000steps", "--output", "all", "train.py")
    await_that((tmp_path / "ready").exists, "20 steps")
    network.cut(network[1])
    result = run.finish()
    assert result.code == 0, result.err
    assert "h2 joins: new workers start there in place of ranks 2 and 3" in result.err
    assert_same_end(result, {b"0", b"1", b"2", b"3"})
