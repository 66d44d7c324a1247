"""Ranks end in the midst of a training, and the others go on, in the same processes and with equal weights."""

from __future__ import annotations

import itertools
import json
import re
import subprocess

import pytest
from harness.patience import PATIENCE
from harness.run import DADT
from harness.survivors import KILL_ONCE_DELIVERED, OPTIONS, lacks, run, script, survivors

from dadt.config import Config
from dadt.errors import ConfigError


@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", ["pipe", pytest.param("sync", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("step", "executor"), [(0, "shm"), (5, "gloo"), (9, "shm"), (10, "gloo"), (11, "shm"), (40, "gloo"), (41, "shm")]
)
def test_the_others_train_on(launch, algorithm: str, step: int, executor: str) -> None:
    where = ("forward", "backward", "exchange")[step % 3]
    result = run(launch, f"{step % 3}:{step}:{where}", "--algorithm", algorithm, "--executor", executor)
    assert result.code == 0, result.err
    ends = survivors(result)
    assert ends.keys() == {0, 1, 2} - {step % 3}
    assert len(set(ends.values())) == 1
    assert f"was killed by signal 9 (SIGKILL) after {step} step" in result.err
    assert f"without rank {step % 3}: 60 steps" in result.err


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("faults", "options", "left"),
    [
        ("2:0:start", [], {0, 1}),
        ("0:0:start,1:0:start", ["--executor", "gloo"], {2}),
        ("1:30:forward,2:30:forward", [], {0}),
        ("1:30:exchange,0:31:exchange", ["--executor", "gloo"], {2}),
        ("1:30:backward,0:45:forward", ["--compression", "int8"], {2}),
        ("1:30:backward", ["--compression", "powersgd:2"], {0, 2}),
        ("1:45:backward", ["--compression", "momentum:1"], {0, 2}),
        ("1:51:exchange", ["--compression", "momentum:1", "--algorithm", "sync"], {0, 2}),
        # As they refresh v, and as they decide whether they send momentum.
        ("1:49:backward", ["--compression", "momentum:1"], {0, 2}),
        ("1:10:backward", ["--compression", "momentum:1", "--warmup-steps", "4"], {0, 2}),
        ("1:60:end", [], {0, 2}),
    ],
)
def test_two_at_once_at_the_start_and_at_the_end(launch, faults: str, options: list[str], left: set[int]) -> None:
    result = run(launch, faults, *options)
    assert result.code == 0, result.err
    ends = survivors(result)
    assert ends.keys() == left
    assert len(set(ends.values())) == 1


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", ["pipe", "sync"])
def test_several_optimizers_and_worker_processes(launch, algorithm: str) -> None:
    result = run(launch, "1:30:backward", "--algorithm", algorithm, two=True, workers=1)
    assert result.code == 0, result.err
    assert survivors(result).keys() == {0, 2}
    assert len(set(survivors(result).values())) == 1


def test_what_the_first_rank_wrote_the_next_one_writes(launch, tmp_path) -> None:
    result = run(launch, "0:30:forward")
    assert result.code == 0, result.err
    assert (tmp_path / "model.pt").exists()
    assert (tmp_path / "log.txt").read_text() == "written by 1\n"


IN_SAVE = """
import pickle, subprocess
class Deadly:
    def __reduce__(self):
        names = subprocess.run(["ls", "-A", "saved"], capture_output=True, text=True).stdout  # scripts do not see it
        assert ".dadt-" in names, "nothing is half written"
        os.kill(os.getpid(), signal.SIGKILL)
torch.save({"weights": model.state_dict(), "also": Deadly() if rank == WHO else None}, "saved/model.pt")
"""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [["--min-np", "1"], [], ["--files", "all", "--no-save-once"]])
def test_nothing_is_left_of_a_file_that_a_killed_rank_has_half_written(launch, tmp_path, options: list[str]) -> None:
    (tmp_path / "saved").mkdir()
    who = "1" if "--no-save-once" in options else "0"
    text = script().replace('torch.save(model.state_dict(), "model.pt")', IN_SAVE.replace("WHO", who))
    text = text.replace("import hashlib", "from pathlib import Path\nimport hashlib")
    result = launch(text, "-np", "3", "--warmup-steps", "10", *options, "train.py", "")
    assert "killed by signal 9" in result.err
    assert result.code == (0 if "--min-np" in options else 137), result.err
    left = {path.name for path in (tmp_path / "saved").iterdir()}
    assert left == {"model.pt"} if "--min-np" in options else left <= {"model.pt"}


def test_the_report_has_who_was_lost(launch) -> None:
    result = run(launch, "1:30:forward")
    report = json.loads((result.logs / result.job / "report.json").read_text())
    (loss,) = report["losses"]
    assert (loss["rank"], report["exit_code"], report["failure"]) == (1, 0, None)
    assert 28 <= loss["step"] <= 30
    events = [json.loads(line) for line in (result.logs / result.job / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["kind"] == "regroup"]
    assert (event["generation"], event["lost"], event["left"]) == (1, [1], [0, 2])


@pytest.mark.slow
def test_a_host_is_lost_and_the_others_train_on(launch) -> None:
    fault = "os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)"
    hosts = ["-np", "4", "--simulate-hosts", "2", "--min-np", "2"]
    result = launch(script(fault), *hosts, "--warmup-steps", "10", "train.py", "0:30:forward")
    assert result.code == 0, result.err
    assert survivors(result).keys() == {2, 3}
    assert len(set(survivors(result).values())) == 1


# The exchange that is late is the last one that the lost rank has begun: no later one comes to its end without it.
@pytest.mark.sample(1)
@pytest.mark.parametrize(("algorithm", "faults"), [("pipe", "2:29:exchange"), ("sync", "2:30:forward")])
def test_a_rank_that_lacks_an_average_takes_the_others_weights(launch, algorithm: str, faults: str) -> None:
    text = script(KILL_ONCE_DELIVERED).replace("\nstep = 0\n", lacks(29) + "\nstep = 0\n")
    result = launch(text, *OPTIONS, "--algorithm", algorithm, "train.py", faults)
    assert result.code == 0, result.err
    assert survivors(result).keys() == {0, 1}
    assert len(set(survivors(result).values())) == 1


DIES_WHILE_CONNECTING = """
from dadt.comm.executors.keys import Keys
from dadt.inject import worker

def set(keys, key, value, ordinary=Keys.set):
    ordinary(keys, key, value)
    if rank == 1 and worker.runtime.ranks.generation == 1:
        die()
Keys.set = set
"""


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["pipe", "gossip"])
def test_a_rank_is_lost_that_others_are_about_to_connect_with(launch, algorithm: str) -> None:
    """Gloo waits for it, and cannot be told."""
    text = script().replace("\nstep = 0\n", DIES_WHILE_CONNECTING + "\nstep = 0\n")
    result = launch(text, *OPTIONS, "--executor", "gloo", "--algorithm", algorithm, "train.py", "0:30:forward")
    assert result.code == 0, result.err
    assert 2 in survivors(result)  # under gossip new workers may have joined since
    assert result.err.count("was killed by signal 9 (SIGKILL)") >= 2
    assert ": 60 steps" in result.err.splitlines()[-1]


LEAVES_WHILE_CONNECTING = """
from dadt.comm.executors import c10d, proof
from dadt.inject import worker

def gloo_group(*how, ordinary=c10d.gloo_group):
    made = ordinary(*how)
    if rank == 1 and worker.runtime.ranks.generation == 1:
        time.sleep(30)  # as where it still connects with the rank that ends; the others have connected with it
    return made

def prove(*how, ordinary=proof.prove):
    if rank == 3 and worker.runtime.ranks.generation == 1:
        die()
    ordinary(*how)
c10d.gloo_group, proof.prove = gloo_group, prove
"""


@pytest.mark.slow
def test_nobody_waits_for_the_proof_of_a_rank_that_connects_with_others_again(launch) -> None:
    text = script().replace("\nstep = 0\n", LEAVES_WHILE_CONNECTING + "\nstep = 0\n")
    result = launch(text, *OPTIONS, "-np", "4", "--executor", "gloo", "train.py", "0:30:forward")
    assert result.code == 0, result.err
    assert survivors(result).keys() == {1, 2}
    assert len(set(survivors(result).values())) == 1
    (seconds,) = re.findall(r"2 of 4 workers train on from step \d+, ([\d.]+) s later", result.err)
    assert float(seconds) < 10.0


@pytest.mark.slow
def test_too_few_are_left(launch) -> None:
    result = run(launch, "0:20:forward,1:40:forward", "--min-np", "2")
    assert result.code == 137
    assert "worker 1 failed (killed by signal 9, SIGKILL)" in result.err
    assert survivors(result) == {}


def test_a_mistake_in_the_script_is_no_loss(launch) -> None:
    result = launch("import torch\nraise ValueError('a mistake')", "-np", "2", "--min-np", "1", "train.py")
    assert result.code == 1
    assert "ValueError: a mistake" in result.err
    assert "goes on" not in result.err


@pytest.mark.slow
def test_ranks_that_do_not_take_the_same_steps_are_no_loss(launch) -> None:
    text = script("optimizers[0].step = lambda: None  # in this step and all that follow")
    result = launch(text, *OPTIONS, "--algorithm", "sync", "train.py", "1:30:exchange")
    assert result.code == 1, result.err
    assert "Mismatch" in result.err
    assert "goes on" not in result.err


@pytest.mark.slow
def test_a_script_with_ranks_of_its_own_is_refused(launch) -> None:
    result = launch("import torch, dadt\ndadt.init()", "-np", "2", "--min-np", "1", "train.py")
    assert result.code == 2
    assert "a script that calls dadt.init() has ranks of its own" in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_np": 3, "np": 2}, "--min-np 3: -np 2 starts no more"),
        ({"min_np": -1}, "--min-np -1: must be 0 or more"),
        ({"min_np": 1, "algorithm": "mine:Own"}, "--algorithm mine:Own ends with any of its ranks"),
        ({"min_np": 1, "executor": "mpi"}, "--executor mpi ends with any of its ranks"),
        ({"min_np": 1, "nnodes": 2}, "a job with --nnodes ends with any of its workers"),
    ],
)
def test_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**options)


@pytest.mark.slow
def test_a_rank_that_is_busy_at_the_end_is_not_lost(launch) -> None:
    result = run(launch, "0:60:end", "--timeout", "4", fault="time.sleep(9)")
    assert result.code == 0, result.err
    assert "goes on" not in result.err
    assert survivors(result).keys() == {0, 1, 2}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fault", "why", "executor"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", "was silent for 6 s, it was stopped (SIGSTOP)", "gloo"),
        ("time.sleep(600)", "was silent for 6 s", "shm"),
    ],
    ids=["stopped", "asleep"],
)
def test_a_silent_rank_is_killed_and_the_others_train_on(launch, fault: str, why: str, executor: str) -> None:
    result = run(launch, "1:30:forward", "--timeout", "6", "--executor", executor, fault=fault)
    assert result.code == 0, result.err
    assert f"{why}: training goes on without it" in result.err
    assert survivors(result).keys() == {0, 2}
    assert len(set(survivors(result).values())) == 1


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("executor", ["shm", "gloo"])
@pytest.mark.parametrize("lost", [0, 2])
def test_the_timeline_of_those_who_are_left(launch, tmp_path, executor: str, lost: int) -> None:
    result = run(launch, f"{lost}:30:forward", "--executor", executor, "--timeline", "t.json")
    assert result.code == 0, result.err
    left = {0, 1, 2} - {lost}
    assert f"without rank {lost}, which was lost" in result.err
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event.get("cat") == "step"} == left
    for rank in left:
        mine = [event for event in events if event["pid"] == rank]
        steps = [event for event in mine if event.get("cat") == "step"]
        assert [event["args"]["step"] for event in steps] == list(range(60))
        assert all(a["ts"] <= b["ts"] for a, b in itertools.pairwise(steps))
        tracks = {event["tid"]: event["args"]["name"] for event in mine if event["name"] == "thread_name"}
        (again,) = [track for track, name in tracks.items() if name == "exchange, generation 1"]
        after = {event["name"] for event in mine if event["tid"] == again and event.get("cat") == "allreduce"}
        assert "step 59, bucket 0" in after
    assert sorted(path.name for path in tmp_path.glob("t.json*")) == ["t.json", f"t.json.rank{lost}"]
    assert subprocess.run([*DADT, "timeline", "t.json"], cwd=tmp_path, timeout=PATIENCE).returncode == 0


@pytest.mark.slow
def test_a_mismatch_names_ranks_as_the_job_began(launch) -> None:
    skip = "if rank == 1 and step == 40:\n        step += 1\n        continue\n    optimizers[0].step()"
    text = script().replace("optimizers[0].step()", skip)
    result = launch(text, *OPTIONS, "--min-np", "2", "--algorithm", "sync", "train.py", "0:30:forward")
    assert result.code == 1, result.err
    assert re.search("rank 1 has drawn 2 batches since its last step and rank 2 1", result.err)
