"""A job, or one of its hosts, is told to end: its script saves a checkpoint first."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable

import pytest
from harness.patience import await_that
from harness.run import Result, Run

from dadt.config import Config
from dadt.errors import ConfigError
from dadt.launch.ending.outcome import Ended, end_early
from dadt.launch.ending.preemption import EXIT_CODE, Preempted
from dadt.launch.ending.signals import of_checkpoint
from dadt.launch.ending.termination import AGAIN_SECONDS
from dadt.train.checkpoint_signal import CheckpointSignal

TRAIN = """
import hashlib, os, signal, sys, time, torch
torch.set_num_threads(1)
rank, restarts = os.environ["DADT_RANK"], int(os.environ["DADT_RESTARTS"])
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def save(number, frame):
    if rank == "0":
        time.sleep(1)  # as long as the others wait
    torch.save(model.state_dict(), f"checkpoint{rank}.pt")
    print(f"rank {rank} has saved", flush=True)
    AFTER
HANDLER
step = 0
while step < 5000:
    optimizer.zero_grad()
    model(torch.randn(2, 4)).pow(2).mean().backward()
    optimizer.step()
    step += 1
    if step == 20:
        with open(f"ready{restarts}-{rank}", "w") as file:
            file.write(str(os.getppid()))
    time.sleep(0.01)
"""
WEIGHTS = """
print("weights", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""
HANDLES = "signal.signal(signal.SIGUSR1, save)"
TWO_HOSTS = ("-H", "localhost:1,127.0.0.1:1")
"""Two agents on this machine."""


def begin(
    start: Callable[..., Run], *options: str, handler: str = HANDLES, after: str = "sys.exit(0)", script: str = TRAIN
) -> Run:
    text = script.replace("HANDLER", handler).replace("AFTER", after)
    run = start(text, "-np", "2", "--checkpoint-signal", "USR1", "--files", "all", *options, "train.py")
    run.wait_for("ready0-0", "ready0-1")
    return run


def saved(result: Result) -> list[str]:
    return sorted(re.findall(r"rank (\d) has saved", result.out.decode()))


def last_line(result: Result) -> str:
    return result.err.splitlines()[-1]


def test_workers_save_and_end_by_themselves(start) -> None:
    run = begin(start, "--grace", "40")
    run.process.send_signal(signal.SIGTERM)
    result = run.finish()
    assert result.code == EXIT_CODE == 75, result.err
    assert saved(result) == ["0", "1"]
    told = "dadt: dadt run was told to end (SIGTERM): "
    assert f"{told}workers have 40 s to save (once more: at once)\n" in result.err
    assert last_line(result) == f"{told}preempted; ranks 0 and 1 ended by themselves (exit code 75)"
    report = json.loads((result.logs / result.job / "report.json").read_text())
    assert f"dadt: {report['preemption']}" == last_line(result)


AT_THE_END_OF_A_STEP = """
import threading
from dadt.inject import worker
told, heard = False, worker.runtime.ranks.requests.checkpoint_signal
def save(number, frame):
    global told
    told = True
if rank == "1":  # it hears of it some steps after the others
    heard.hear = lambda *order, hear=heard.hear: threading.Timer(0.5, hear, order).start()
signal.signal(signal.SIGUSR1, save)
"""
SAVE_AND_END = """
    if told:
        torch.save(model.state_dict(), "checkpoint.pt")
        print(f"rank {rank} has saved: {step}")
        sys.exit()
    time.sleep(0.01)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", ["pipe", "sync", "local"])
def test_all_are_told_in_the_same_step_and_none_ends_before_others_have_saved(start, algorithm: str) -> None:
    saves = 'torch.save(model.state_dict(), "checkpoint.pt")\n        print(f"rank {rank} has saved: {step}")'
    script = TRAIN.replace(
        "    if step == 20:", f"    if told:\n        {saves}\n        sys.exit()\n    if step == 20:"
    )
    options = ("-np", "3", "--algorithm", algorithm, "--warmup-steps", "5", "--grace", "40")
    run = begin(start, *options, handler=AT_THE_END_OF_A_STEP, script=script)
    run.process.send_signal(signal.SIGTERM)
    result = run.finish()
    assert result.code == 75, result.err
    steps = dict(re.findall(r"rank (\d) has saved: (\d+)", result.out.decode()))
    assert steps.keys() == {"0", "1", "2"}, result.out
    assert len(set(steps.values())) == 1, steps
    assert last_line(result).endswith("preempted; ranks 0, 1 and 2 ended by themselves (exit code 75)")


RANKS_OF_ITS_OWN = """
import os, signal, time, dadt
told = []
signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
dadt.init()
with open(f"ready0-{os.environ['DADT_RANK']}", "w") as file:
    file.write(str(os.getppid()))
while not told:
    time.sleep(0.01)
print(f"rank {os.environ['DADT_RANK']} has saved")
"""


@pytest.mark.slow
def test_a_script_with_ranks_of_its_own_is_told_though_it_takes_no_step(start) -> None:
    run = begin(start, "--grace", "4", script=RANKS_OF_ITS_OWN)
    run.process.send_signal(signal.SIGUSR1)
    result = run.finish()
    assert result.code == 0, result.err
    assert saved(result) == ["0", "1"]


def test_what_was_told_before_training_begins_is_not_forgotten() -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    try:
        checkpoint = CheckpointSignal()
        checkpoint.begin(signal.SIGUSR1, 0)
        checkpoint.hear(0.2, 1)
        checkpoint.begin(signal.SIGUSR1, 1)  # `dadt.init` has begun before
        await_that(lambda: told, "the signal")
        checkpoint.agree([1, 0])
        checkpoint.stepped(1)
        assert told == [signal.SIGUSR1]
        checkpoint.agree([1, 2])
        checkpoint.stepped(2)
        assert told == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.slow
def test_workers_save_and_go_on_until_they_are_stopped(start) -> None:
    run = begin(start, "--grace", "8", "--max-restarts", "2", after="")
    run.process.send_signal(signal.SIGTERM)
    result = run.finish()
    assert result.code == 75, result.err
    assert saved(result) == ["0", "1"]
    assert last_line(result).endswith("preempted; ranks 0 and 1 went on and were stopped (exit code 75)")
    assert "restart" not in result.err


@pytest.mark.slow
def test_the_signal_itself_ends_nothing(start) -> None:
    """All ranks wait in the midst of a step while the first one saves, and train on to the same weights."""
    script = TRAIN.replace("step < 5000", "step < 60") + WEIGHTS
    run = begin(start, "--forward-signals", "USR2", after="", script=script)
    run.process.send_signal(signal.SIGUSR1)
    result = run.finish()
    assert result.code == 0, result.err
    assert saved(result) == ["0", "1"]
    assert len(set(re.findall(r"weights (\w+)", result.out.decode()))) == 1


@pytest.mark.slow
def test_a_worker_without_a_handler_is_not_killed_by_the_signal(start) -> None:
    handler = f'if rank == "0": {HANDLES}'
    run = begin(start, "--grace", "2", handler=handler, after="")
    run.process.send_signal(signal.SIGUSR1)
    await_that((run.folder / "checkpoint0.pt").exists, "rank 0's checkpoint")
    run.process.send_signal(signal.SIGTERM)
    result = run.finish()
    assert result.code == 75, result.err
    assert saved(result) == ["0", "0"]
    text = "dadt: warning: rank 1: no handler of SIGUSR1, so it was not sent; nothing saved\n"
    assert result.err.count(text) == 2, result.err
    assert last_line(result).endswith("preempted; ranks 0 and 1 went on and were stopped (exit code 75)")


@pytest.mark.slow
def test_told_twice_means_at_once(start) -> None:
    run = begin(start, "--grace", "300", after="time.sleep(600)")
    for _ in range(2):  # the first two are one
        run.process.send_signal(signal.SIGTERM)
    events = run.folder / "dadt-logs" / run.job / "events.jsonl"
    await_that(lambda: '"kind": "stop"' in events.read_text(), "the launcher's answer")
    told = time.monotonic()
    await_that((run.folder / "checkpoint0.pt").exists, "rank 0's checkpoint")
    await_that(lambda: time.monotonic() > told + AGAIN_SECONDS + 1, "a SIGTERM that is another one")
    run.process.send_signal(signal.SIGTERM)
    result = run.finish()
    assert result.code == 75, result.err
    assert "ranks 0 and 1 went on and were stopped" in last_line(result)


FLOOD = """
import os, signal, sys, threading, time, torch
rank = os.environ["DADT_RANK"]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def save(number, frame):
    torch.save(model.state_dict(), f"checkpoint{rank}.pt")
    time.sleep(600)
def flood():
    while True:
        os.write(1, b"a line that nobody reads\\n" * 100)
HANDLER
for step in range(5000):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).pow(2).mean().backward()
    optimizer.step()
    if step == 20:
        threading.Thread(target=flood, daemon=True).start()
        time.sleep(1)  # so that the launcher has more than it can pass on
        with open(f"ready0-{rank}", "w") as file:
            file.write(str(os.getppid()))
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_told_twice_within_a_moment_is_told_once_though_nobody_reads_the_output(start) -> None:
    run = begin(start, "--grace", "300", script=FLOOD)
    run.process.send_signal(signal.SIGTERM)
    events = run.folder / "dadt-logs" / run.job / "events.jsonl"
    await_that(lambda: '"kind": "stop"' in events.read_text(), "the launcher's answer")
    told = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    for rank in (0, 1):
        await_that((run.folder / f"checkpoint{rank}.pt").exists, f"rank {rank}'s checkpoint")
    await_that(lambda: time.monotonic() > told + AGAIN_SECONDS + 1, "a SIGTERM that is another one")
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGTERM)
    result = run.finish()
    assert result.code == 75, result.err[-2000:]


@pytest.mark.slow
def test_ctrl_c_is_no_preemption(start) -> None:
    run = begin(start, "--grace", "1")
    run.process.send_signal(signal.SIGINT)
    result = run.finish()
    assert result.code == 130 and not saved(result), result.err


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--min-np", "2"]])
def test_a_host_is_told_to_end_and_the_job_with_it(start, options: list[str]) -> None:
    run = begin(start, "--grace", "40", *TWO_HOSTS, *options)
    [agent] = run.wait_for("ready0-1")
    os.kill(agent, signal.SIGTERM)
    result = run.finish()
    assert result.code == 75, result.err
    assert saved(result) == ["0", "1"]
    told = "dadt: 127.0.0.1 was told to end (SIGTERM): preempted; ranks 0 and 1 ended by themselves (exit code 75)"
    assert last_line(result) == told


def test_a_host_is_told_to_end_and_the_job_starts_again(start) -> None:
    script = TRAIN.replace("step < 5000", "step < (5000 if restarts == 0 else 60)")
    run = begin(start, "--grace", "40", "--max-restarts", "1", *TWO_HOSTS, script=script)
    [agent] = run.wait_for("ready0-1")
    os.kill(agent, signal.SIGTERM)
    result = run.finish()
    assert result.code == 0, result.err
    assert saved(result) == ["0", "1"], result.err
    assert "preempted; ranks 0 and 1 ended by themselves (exit code 75): restart 1 of 1\n" in result.err


UNTIL_IT_IS_ALONE = """
import functools
from pathlib import Path
events = Path("dadt-logs", os.environ["DADT_JOB"], "events.jsonl")
@functools.cache
def end():
    return step + 20
def last():
    return end() if '"kind": "regroup"' in events.read_text() else step + 1
"""
"""The number of the last step: 20 more than there were once the others had gone."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("after", ["sys.exit(0)", ""], ids=["ends", "is stopped"])
def test_a_host_is_told_to_end_and_the_other_trains_on(start, after: str) -> None:
    script = TRAIN.replace("step < 5000", "step < last()") + 'print("steps", step)'
    handler = UNTIL_IT_IS_ALONE + HANDLES
    options = ("--grace", "5", "--min-np", "1", *TWO_HOSTS)
    run = begin(start, *options, handler=handler, after=after, script=script)
    [agent] = run.wait_for("ready0-1")
    os.kill(agent, signal.SIGTERM)
    result = run.finish()
    assert result.code == 0, result.err
    assert saved(result) == ["1"]
    assert "dadt: warning: 127.0.0.1 was told to end (SIGTERM): its workers save and end\n" in result.err
    assert " has left, as its host was told to end: training goes on without it\n" in result.err
    assert "1 of 2 workers train on from step" in result.err
    [steps] = re.findall(r"steps (\d+)", result.out.decode())
    assert f", without rank 1: {steps} steps" in last_line(result)


def test_before_workers_run_the_code_is_the_same() -> None:
    end_early({signal.SIGUSR1}, signal.SIGUSR1)
    with pytest.raises(Preempted, match=r"no worker was there \(exit code 75\); nothing was started"):
        end_early({signal.SIGTERM}, signal.SIGUSR1)
    with pytest.raises(Ended, match="ended by SIGTERM; nothing was started"):
        end_early({signal.SIGTERM}, 0)
    with pytest.raises(Ended, match="ended by Ctrl-C"):
        end_early({signal.SIGINT}, signal.SIGUSR1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("TERM", "--checkpoint-signal TERM: this signal ends the job; give one that the script answers by saving"),
        ("KILL", "--checkpoint-signal KILL: KILL is no signal that can be forwarded"),
        ("SIGNAL", "--checkpoint-signal SIGNAL: SIGNAL is no signal that can be forwarded"),
    ],
)
def test_what_is_no_signal_for_it(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        of_checkpoint(Config(np=2, checkpoint_signal=name))
    assert said in str(error.value)
    assert of_checkpoint(Config(np=2, checkpoint_signal="sigusr1")) == signal.SIGUSR1
