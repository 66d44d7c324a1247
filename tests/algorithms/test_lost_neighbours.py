"""Ranks end while each takes steps of its own, and the others go on."""

from __future__ import annotations

import json
import re

import pytest
from harness.survivors import CUT, KILL, KILL_ONCE_DELIVERED, lacks

TRAIN = """
import hashlib, os, re, signal, sys, time, torch
torch.set_num_threads(1)
torch.manual_seed(0)
rank = int(re.search("DADT_RANK=([0-9]+)", open("/proc/self/environ").read())[1])
faults = [fault.split(":") for fault in sys.argv[1].split(",")]

def comes(step, where):
    if [str(rank), str(step), where] in faults:
        FAULT

def net(*widths):
    layers = [torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.BatchNorm1d(b)) for a, b in zip(widths, widths[1:])]
    return torch.nn.Sequential(*layers)

comes(0, "start")
model, other = net(16, 32, 4), net(4, 8, 16)
optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, other)[: 1 + TWO]]

from dadt.inject import worker
from dadt.train.own_moments import OwnMoments
step = 0
LACKS

def share(own, *, alone, ordinary=OwnMoments.share):
    comes(step, "moments")
    ordinary(own, alone=alone)
OwnMoments.share = share

def tell():
    tensors = [*model.state_dict().values(), *(other.state_dict().values() if TWO else [])]
    weights = b"".join(t.numpy().tobytes() for t in tensors)
    factors = repr([each.momentum.state().get("factors") for each in worker.runtime.attachments])
    print("ends with", hashlib.sha256(weights + factors.encode()).hexdigest(), flush=True)

for step in range(60):
    comes(step, "forward")
    x, y = torch.randn(4, 16), torch.randint(4, (4,))
    optimizers[0].zero_grad()
    predicted = model(x)
    torch.nn.functional.cross_entropy(predicted, y).backward()
    comes(step, "step")
    optimizers[0].step()
    if TWO:
        optimizers[1].zero_grad()
        (other(predicted.detach()) - x.detach()).pow(2).mean().backward()
        optimizers[1].step()
step = 60
comes(step, "end")
worker.runtime.events.on_end += [lambda: comes(60, "gone"), tell]
"""
OPTIONS = ["-np", "3", "--min-np", "1", "--warmup-steps", "5"]
ONCE_DELIVERED = KILL_ONCE_DELIVERED.replace("\n", "\n    ")
LOCAL = ["--algorithm", "local", "--sync-every", "6"]


def ends(result) -> dict[int, str]:
    """Rank and a digest of its weights after the last average, and of the factors by which ranks compute a common v."""
    assert result.code == 0, result.err
    lines = [line.split() for line in result.out.decode().splitlines() if "ends with" in line]
    return {int(words[0].strip("[")[0]): words[-1] for words in lines}


def train(
    launch, faults: str, *options: str, two: bool = False, late: int = 0, what: str = "bucket", fault: str = KILL
):
    """late, what: of the exchange whose average rank 1 lacks."""
    lacked = lacks(late, what) if late else ""
    script = TRAIN.replace("TWO", str(two)).replace("LACKS", lacked).replace("FAULT", fault)
    return launch(script, *OPTIONS, *options, "train.py", faults)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("faults", "left", "options"),
    [
        ("1:0:start", {0, 2}, []),
        pytest.param("1:3:forward", {0, 2}, ["--executor", "gloo"], marks=pytest.mark.slow),
        pytest.param("0:5:forward", {1, 2}, [], marks=pytest.mark.slow),
        ("2:11:step", {0, 1}, ["--executor", "gloo"]),
        ("1:12:forward", {0, 2}, []),
        ("0:20:step", {1, 2}, ["--fragments", "3", "--outer-momentum", "0.9", "--outer-lr", "0.7"]),
        ("0:20:step,1:22:forward", {2}, ["--fragments", "2", "--executor", "gloo"]),
        pytest.param("1:20:step,2:20:step", {0}, [], marks=pytest.mark.slow),
        pytest.param("2:30:forward", {0, 1}, ["--compression", "int8"], marks=pytest.mark.slow),
        ("0:31:forward", {1, 2}, ["--compression", "powersgd:2", "--executor", "gloo"]),
        ("1:60:end", {0, 2}, []),
    ],
)
def test_a_round_goes_on_without_the_lost(launch, faults: str, left: set[int], options: list[str]) -> None:
    result = train(launch, faults, *LOCAL, *options)
    weights = ends(result)
    assert weights.keys() == left
    assert len(set(weights.values())) == 1
    lost = {0, 1, 2} - left
    assert all(re.search(rf"without ranks? [0-9, and]*{rank}", result.err) for rank in lost), result.err
    assert "differ" not in result.err


@pytest.mark.slow
def test_rounds_of_several_optimizers(launch) -> None:
    weights = ends(train(launch, "1:25:step", *LOCAL, two=True))
    assert weights.keys() == {0, 2}
    assert len(set(weights.values())) == 1


@pytest.mark.parametrize(
    ("late", "what", "faults"),
    [
        (4, "bucket", "2:4:moments"),
        pytest.param(4, "second moments", "2:5:forward", marks=pytest.mark.slow),
        pytest.param(19, "bucket", "2:20:forward", marks=pytest.mark.slow),
        pytest.param(19, "bucket", "2:21:step", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_lacks_an_average_takes_what_others_have_made_of_it(
    launch, late: int, what: str, faults: str
) -> None:
    options = [*LOCAL, "--outer-momentum", "0.5"]
    weights = ends(train(launch, faults, *options, late=late, what=what, fault=ONCE_DELIVERED))
    assert weights.keys() == {0, 1}
    assert len(set(weights.values())) == 1


@pytest.mark.slow
def test_others_have_left_after_the_last_average(launch) -> None:
    result = train(launch, "2:60:gone", *LOCAL, late=60, what="buffers", fault=ONCE_DELIVERED)
    assert 0 in ends(result)
    assert "without rank 2: 60 steps" in result.err


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("faults", "left", "options"),
    [
        ("1:0:start", {0, 2}, []),
        ("1:20:forward", {0, 2}, ["--executor", "gloo"]),
        ("0:20:step", {1, 2}, []),
        ("0:20:step,1:22:forward", {2}, ["--executor", "gloo", "--topology", "ring"]),
        ("2:30:forward", {0, 1}, ["--compression", "int8"]),
        ("1:60:end", {0, 2}, ["--executor", "gloo"]),
        ("1:60:gone", {0, 2}, []),
    ],
)
def test_neighbours_that_are_left_gossip_on(launch, faults: str, left: set[int], options: list[str]) -> None:
    result = train(launch, faults, "--algorithm", "gossip", *options)
    weights = ends(result)
    assert weights.keys() == left
    assert len(set(weights.values())) == 1


LATE = """
from dadt.comm.executors.meet import AllRanks

def exchange(meet, key, blob, ordinary=AllRanks.exchange):
    while rank == 0 and key == "the end" and not worker.runtime.ranks.generation:
        time.sleep(0.01)
    return ordinary(meet, key, blob)
AllRanks.exchange = exchange
"""


@pytest.mark.slow
def test_a_rank_enters_the_next_generation_while_it_asks_for_the_end_of_this_one(launch) -> None:
    script = TRAIN.replace("TWO", "False").replace("LACKS", LATE).replace("FAULT", KILL)
    result = launch(script, *OPTIONS, "--algorithm", "gossip", "train.py", "1:60:gone")
    assert ends(result).keys() == {0, 2}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("faults", ["1:20:forward", "0:60:end"])
def test_neighbours_whose_connection_fails_connect_anew(launch, faults: str) -> None:
    cut = CUT.replace("\n", "\n    ")
    result = train(launch, faults, "--algorithm", "gossip", "--executor", "gloo", fault=cut)
    weights = ends(result)
    assert weights.keys() == {0, 1, 2}
    assert len(set(weights.values())) == 1
    assert ": all ranks connect anew" in result.err


JOIN = """
import os, re, signal, subprocess, time, torch
from pathlib import Path
torch.set_num_threads(1)
environment = open("/proc/self/environ").read()
rank, joins = int(re.search("DADT_RANK=([0-9]+)", environment)[1]), "DADT_JOINS=1" in environment
torch.manual_seed(joins)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
enough, step = Path("enough"), 0
while joins or not enough.exists():
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(4, (8,))).backward()
    if joins and step == 0:
        velocity = optimizer.state[model[0].weight]["momentum_buffer"]
        print("joins at", float(model[0].weight.mean()), float(velocity.norm()) > 0, int(model[1].num_batches_tracked))
    optimizer.step()
    with torch.no_grad():
        if not joins:
            model[0].weight += 1.0 - model[0].weight.mean()  # by which its weights are known
    step += 1
    if rank == 0 and step == 30 and not joins:
        os.kill(os.getpid(), signal.SIGKILL)
    if joins and step == 20:
        torch.save(model.state_dict(), "of_the_new.pt")
        subprocess.run(["touch", enough], check=True)  # what Python writes here stays apart
    time.sleep(0.005)
torch.save(model.state_dict(), "model.pt")
print("ends with", f"{rank}, step {step}")
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("executor", ["shm", "gloo"])
def test_a_new_worker_takes_a_neighbours_weights_and_state(launch, tmp_path, executor: str) -> None:
    options = ["--algorithm", "gossip", "--executor", executor, "--output", "all"]
    result = launch(JOIN, "-np", "3", "--min-np", "1", *options, "train.py")
    assert result.code == 0, result.err
    told = re.search(rb"joins at ([\d.]+) (\w+) (\d+)", result.out)
    assert told, result.out
    assert float(told[1]) == pytest.approx(1.0, abs=0.05)
    assert told[2] == b"True"
    assert int(told[3]) > 10
    assert "a new worker starts in place of rank 0" in result.err
    assert "leaves, as those that began the job are at their end" in result.err
    assert ", with new workers in place of rank 0: " in result.err.splitlines()[-1]
    assert ends(result).keys() == {1, 2}, result.out
    assert (tmp_path / "model.pt").exists()
    assert not (tmp_path / "of_the_new.pt").exists()
    events = [json.loads(line) for line in (result.logs / result.job / "events.jsonl").read_text().splitlines()]
    assert [event["rank"] for event in events if event["kind"] == "join"] == [0]


@pytest.mark.slow
def test_a_new_worker_that_fails_at_once_ends_nothing(launch) -> None:
    fails = 'if joins and step == 0:\n        subprocess.run(["touch", enough], check=True); raise ValueError("new")'
    script = JOIN.replace("    optimizer.step()\n", f"    {fails}\n    optimizer.step()\n")
    result = launch(script, "-np", "3", "--min-np", "1", "--algorithm", "gossip", "--executor", "shm", "train.py")
    assert "failed with ValueError: new" in result.err
    assert ends(result).keys() == {1, 2}
