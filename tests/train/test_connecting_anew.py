"""The connection between ranks fails though all of them live: all connect anew, and nothing is missing."""

from __future__ import annotations

import json
import re

import pytest
from harness.survivors import CUT, OPTIONS, run, script, survivors

FAIL = """
    from dadt.inject import worker
    worker.runtime.ranks.engine.abort("broken for the test")
"""
"""Shared memory has no connection that could break, and over TCP those that break are replaced: the engine fails."""


TELLS = """
from dadt.train.replicas import Replicas

def catch_up(*what, ordinary=Replicas.catch_up, **how):
    print(f"rank {rank} catches up")
    ordinary(*what, **how)
Replicas.catch_up = catch_up
"""
"""A rank lacked an average that others had had already, which depends on the moment."""


def weights(result) -> str:
    assert result.code == 0, result.err
    ends = survivors(result)
    assert ends.keys() == {0, 1, 2}
    (digest,) = set(ends.values())
    return digest


@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", ["pipe", pytest.param("sync", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("faults", "executor"),
    [
        pytest.param("1:11:forward", "tcp", marks=pytest.mark.slow),
        pytest.param("2:30:backward", "tcp", marks=pytest.mark.slow),
        ("0:30:exchange", "tcp"),
        ("1:30:backward", "shm"),
        ("0:20:forward,2:20:forward,1:40:exchange", "tcp"),
    ],
)
def test_training_goes_on_with_all(launch, algorithm: str, faults: str, executor: str) -> None:
    settings = ["--algorithm", algorithm, "--executor", executor, "--compression", "none"]
    text = script(FAIL).replace("\nstep = 0\n", TELLS + "\nstep = 0\n")
    result = launch(text, *OPTIONS, *settings, "train.py", faults)
    digest = weights(result)
    assert ": all ranks connect anew" in result.err
    assert re.search(r"3 of 3 workers train on from step \d+, [\d.]+ s later\n", result.err)
    assert "without" not in result.err
    if b"catches up" not in result.out:  # else prediction has begun anew, and all ranks have gone another way
        assert digest == weights(run(launch, "", *settings, fault="pass"))


@pytest.mark.parametrize("algorithm", ["pipe", pytest.param("sync", marks=pytest.mark.slow)])
def test_connections_that_are_replaced_are_nothing_to_tell(launch, algorithm: str) -> None:
    settings = ["--algorithm", algorithm, "--executor", "tcp"]
    faults = "0:20:forward,2:20:forward,1:30:backward,1:40:exchange"
    result = launch(script(CUT), *OPTIONS, *settings, "train.py", faults)
    assert "anew" not in result.err and "without" not in result.err
    assert weights(result) == weights(run(launch, "", *settings, fault="pass"))


def test_the_journal_and_the_report_tell(launch) -> None:
    result = run(launch, "1:30:forward", "--executor", "tcp", fault=FAIL)
    weights(result)
    folder = result.logs / result.job
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["kind"] == "regroup"]
    report = json.loads((folder / "report.json").read_text())
    (regroup,) = report["regroups"]
    assert report["losses"] == []
    for told in (event, regroup):
        assert (told["generation"], told["lost"], told["left"]) == (1, [], [0, 1, 2])


@pytest.mark.slow
def test_what_happens_again_and_again_ends_the_job(launch) -> None:
    again = """
from dadt.inject import worker

def connect(connect=worker.runtime.recovery.connect):
    connect()
    if step == 30 and rank == 1:
        worker.runtime.ranks.connection.abort("broken again", lost=False)
worker.runtime.recovery.connect = connect
"""
    text = script(FAIL).replace("\nstep = 0\n", again + "\nstep = 0\n")
    result = launch(text, *OPTIONS, "--algorithm", "sync", "train.py", "1:30:exchange")
    assert result.code == 1, result.err
    assert result.err.count(": all ranks connect anew") == 3
    assert re.search(
        "cause .*broken for the test; since then all ranks have connected anew 3 times in vain", result.err
    )
    assert "training goes on" not in result.err
    assert survivors(result) == {}


@pytest.mark.slow
def test_ranks_in_different_steps_are_told_so(launch) -> None:
    skip = "if rank == 1 and step == 30:\n        step += 1\n        continue\n    optimizers[0].step()"
    result = launch(script().replace("optimizers[0].step()", skip), *OPTIONS, "--executor", "tcp", "train.py", "")
    assert "rank 1 has drawn 2 batches since its last step" in result.err
    assert "all ranks connect anew" not in result.err
