"""A job that failed starts again, and its script goes on from its own checkpoint."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.patience import await_that
from harness.run import DADT, Result, Run

from dadt.config import Config
from dadt.errors import ConfigError

TRAIN = """
import os, signal, sys, time, torch
torch.set_num_threads(1)
torch.manual_seed(0)
rank, restarts = os.environ["DADT_RANK"], int(os.environ["DADT_RESTARTS"])
assert os.environ["TORCHELASTIC_RESTART_COUNT"] == str(restarts)
with open(f"attempt{restarts}-{rank}", "w") as file:
    file.write(str(os.getpid()))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
begin = 0
if os.path.exists("checkpoint.pt"):
    checkpoint = torch.load("checkpoint.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    begin = checkpoint["step"]
print(f"rank {rank} begins at {begin}", flush=True)
for step in range(begin, 30):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).pow(2).mean().backward()
    optimizer.step()
    if step % 10 == 9:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**states, "step": step + 1}, "checkpoint.pt")
    if rank == "1" and step == 15:
        FAULT
print(f"rank {rank} ends with {model.weight.tolist()}", flush=True)
"""
KILL = "if restarts == 0: os.kill(os.getpid(), signal.SIGKILL)"
KILL_AGENT = "if restarts == 0: os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)"
OPTIONS = ["-np", "2", "--warmup-steps", "4", "--files", "all", "--max-restarts"]


def run(launch: Callable[..., Result], fault: str, most: int) -> Result:
    return launch(TRAIN.replace("FAULT", fault), *OPTIONS, str(most), "train.py")


def begins(result: Result) -> list[str]:
    return sorted(line for line in result.out.decode().splitlines() if "begins at" in line)


def test_a_killed_worker_restarts_the_job_from_its_checkpoint(launch) -> None:
    result = run(launch, KILL, 3)
    assert result.code == 0, result.err
    assert begins(result) == [f"[{rank}] rank {rank} begins at {step}" for rank in (0, 1) for step in (0, 10)]
    ends = [line.partition(" with ")[2] for line in result.out.decode().splitlines() if "ends with" in line]
    assert len(ends) == 2 and ends[0] == ends[1]
    assert "dadt: warning: worker 1 failed (killed by signal 9, SIGKILL) after " in result.err
    assert ": restart 1 of 3\n" in result.err
    assert "dadt: done in " in result.err and " s, after 1 restart: 20 steps" in result.err
    assert b"begins at 0\n" in result.log(0) and b"\ndadt: restart 1\n" in result.log(0)
    report = json.loads((result.logs / result.job / "report.json").read_text())
    assert [told["why"].split(" after ")[0] for told in report["restarts"]] == [
        "worker 1 failed (killed by signal 9, SIGKILL)"
    ]
    assert report["exit_code"] == 0
    for name in ("progress.0.jsonl", "progress.jsonl"):
        assert (result.logs / result.job / name).read_text()


@pytest.mark.slow
def test_a_lost_agent_restarts_the_job(launch) -> None:
    result = run(launch, KILL_AGENT, 1)
    assert result.code == 0, result.err
    assert "the agent of this host" in result.err and ": restart 1 of 1\n" in result.err
    assert begins(result)[-1] == "[1] rank 1 begins at 10"


def test_a_host_whose_agent_was_lost_is_waited_for_where_slots_are_not_known(launch) -> None:
    two = ("-H", "localhost,127.0.0.1", "--max-restarts", "1")
    result = launch(TRAIN.replace("FAULT", KILL_AGENT), *OPTIONS[:-1], *two, "train.py")
    assert result.code == 0, result.err
    assert result.err.count(": restart 1 of 1\n") == 1 and "2 workers on 2 hosts" in result.err


@pytest.mark.slow
def test_attempts_that_fail_alike_are_the_last(launch) -> None:
    result = run(launch, "raise ValueError('of no use')", 5)
    assert result.code == 1, result.err
    assert len(begins(result)) == 6  # at 0, at 10 after other steps, and once more
    assert "dadt: warning: attempts 2 and 3 failed alike: no restart\n" in result.err
    last = result.err[result.err.rindex("dadt: worker 1 failed") :]
    assert "cause   ValueError: of no use" in last


@pytest.mark.slow
def test_no_more_restarts_than_allowed(launch) -> None:
    result = run(launch, "os.kill(os.getpid(), signal.SIGKILL)", 1)
    assert result.code == 137, result.err
    assert result.err.count(": restart ") == 1


@pytest.mark.slow
def test_what_the_user_ends_stays_ended(start: Callable[..., Run]) -> None:
    run = start(TRAIN.replace("FAULT", "time.sleep(600)"), *OPTIONS, "3", "train.py")
    run.wait_for("attempt0-0", "attempt0-1")
    run.process.send_signal(signal.SIGINT)
    result = run.finish()
    assert result.code == 130 and "restart" not in result.err, result.err


def test_a_host_that_was_never_there_is_no_reason(launch) -> None:
    result = launch("", "-np", "2", "-H", "nowhere.invalid", "--max-restarts", "3", "train.py")
    assert result.code == 3 and "restart" not in result.err, result.err


def test_a_job_started_by_hand_cannot_start_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-restarts 1: a job with --nnodes is started by hand"):
        Config(np=2, max_restarts=1, nnodes=2)
    with pytest.raises(ConfigError, match="--max-restarts -1: must be 0 or more"):
        Config(np=2, max_restarts=-1)


AGAIN = """
import os, sys, time
if os.environ["DADT_RESTARTS"] == "0":
    print("the first attempt", flush=True)
    while not os.path.exists("followed"):
        time.sleep(0.02)
    sys.exit(5)
print("the second attempt", flush=True)
"""


def test_logs_are_followed_over_a_restart(start: Callable[..., Run]) -> None:
    run = start(AGAIN, "-np", "1", "--max-restarts", "1", "train.py")
    log = run.folder / "dadt-logs" / run.job / "rank0.log"
    await_that(lambda: log.exists() and b"first" in log.read_bytes(), "the first attempt")
    with subprocess.Popen([*DADT, "logs", run.job, "-f"], cwd=run.folder, stdout=subprocess.PIPE) as following:
        assert following.stdout is not None
        lines = [following.stdout.readline()]
        (run.folder / "followed").touch()
        lines += following.stdout.readlines()
    assert run.finish().code == 0
    assert lines == [b"[0] the first attempt\n", b"[0] dadt: restart 1\n", b"[0] the second attempt\n"]
