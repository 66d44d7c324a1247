"""The exit code and the signal of the worker that ended first are the job's, also after training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import lightened
from harness.run import Result

TRAIN = """
import atexit, builtins, ctypes, os, signal, sys, torch
torch.set_num_threads(1)
if "MALLOC_ARENA_MAX" not in os.environ:  # a common way to set what only a process's start reads
    os.environ["MALLOC_ARENA_MAX"] = "2"
    os.execv(sys.executable, [sys.executable, *sys.argv])
mine = "one" not in sys.argv or os.environ["RANK"] == "1"
class Broken:
    def __del__(self): ctypes.string_at(0)
model = torch.nn.Linear(4, 1)
if "ddp" in sys.argv:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6 if mine or "same" in sys.argv else 1000):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
if mine:
    END
"""
TEXT = r'sys.exit("no GPU is free\non this node")'


def run(launch: Callable[..., Result], end: str, *options: str, script: tuple[str, ...] = (), **env: str) -> Result:
    return launch(lightened(TRAIN.replace("END", end)), "-np", "2", *options, "train.py", *script, **env)


def test_all_ranks_leave_with_the_same_code_after_they_have_replaced_themselves(launch) -> None:
    result = run(launch, "sys.exit(3)")
    assert result.code == 3, result.err
    assert "dadt: all 2 workers failed (exit code 3) after " in result.err and ", at step 6\n" in result.err
    assert "  cause   each exited with code 3\n" in result.err


def test_the_text_of_sys_exit_is_the_cause(launch) -> None:
    result = run(launch, TEXT, script=("one",), MALLOC_ARENA_MAX="2")
    assert result.code == 1, result.err
    assert "dadt: worker 1 failed (exit code 1) after " in result.err
    assert '  cause   no GPU is free\n          on this node\n    File "train.py", line 20' in result.err


ENDS = {
    "75": ("sys.exit(75)", 75, "exit code 75"),
    "raised": ("raise SystemExit('no GPU is free')", 1, "exit code 1"),
    "caught": ("try: sys.exit('not by this')\n    except SystemExit: sys.exit(4)", 4, "exit code 4"),
    "in the last moment": ("builtins.kept = Broken()", 139, "killed by signal 11, SIGSEGV"),
    "at the end": ("atexit.register(lambda: ctypes.string_at(0))", 139, "killed by signal 11, SIGSEGV"),
    "alarm": ("signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause()", 142, "killed by signal 14, SIGALRM"),
}
SCRIPTS = [("one",), ("one", "same"), ("same",), ("one", "ddp")]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids="-".join)
@pytest.mark.parametrize("algorithm", ["pipe", "sync"])
@pytest.mark.parametrize("how", ENDS)
def test_what_was_seen_of_the_end_is_what_is_said(launch, how: str, algorithm: str, script: tuple[str, ...]) -> None:
    end, code, verdict = ENDS[how]
    result = run(launch, end, "--algorithm", algorithm, script=script)
    assert result.code == code, result.err
    who = "worker 1" if "one" in script else r"all 2 workers"
    if "one" in script or how != "alarm":  # whose processes die one after the other
        assert f"dadt: {who} failed ({verdict}) after " in result.err, result.err
    assert "ended too early" not in result.err and "not by this" not in result.err.partition("  cause")[2]


@pytest.mark.slow
def test_after_training_nobody_trains_on_without_a_rank(launch) -> None:
    result = run(launch, "sys.exit(75)", "--min-np", "1")
    assert result.code == 75, result.err
    assert "training goes on" not in result.err and "dadt: all 2 workers failed (exit code 75)" in result.err


AGAIN = """
import os, sys, torch
torch.set_num_threads(1)
image = int(os.environ.get("IMAGE", 0))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
if os.path.exists("last.pt"):
    weights, state = torch.load("last.pt")
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
torch.save([model.state_dict(), optimizer.state_dict()], "last.pt")
print("trained", image, flush=True)
if image < 1 and (sys.argv[1] == "all" or os.environ["RANK"] == "1"):
    os.environ["IMAGE"] = str(image + 1)
    os.execv(sys.executable, [sys.executable, *sys.argv])
for step in range(30 if sys.argv[1] == "one" else 0):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_all_ranks_replace_themselves_amid_training(launch) -> None:
    result = launch(lightened(AGAIN), "-np", "2", "train.py", "all")
    assert result.code == 0, result.err
    assert result.out.count(b"trained") == 4 and result.out.count(b"trained 1") == 2


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["shm", "gloo"])
def test_one_rank_replaces_itself_while_others_train(launch, executor: str) -> None:
    result = launch(lightened(AGAIN), "-np", "2", "--executor", executor, "--timeout", "40", "train.py", "one")
    assert result.code == 1, result.err
    assert "has replaced itself (exec) after it had begun to train" in result.err


LEAVES = """
import os, sys, time, torch
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    if step == 9 and (sys.argv[1] == "all" or os.environ["RANK"] in sys.argv[1]): os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--algorithm", "sync", "--executor", "gloo"), ("--algorithm", "gossip")])
def test_the_others_train_on_without_a_rank_that_left_as_if_all_were_done(launch, options: tuple[str, ...]) -> None:
    result = launch(LEAVES, "-np", "3", "--min-np", "2", *options, "train.py", "1")
    assert result.code == 0, result.err
    assert result.err.count("has exited with code 0 after 10 steps, while others went on: training goes on") == 1
    assert "without rank 1: 40 steps" in result.err


@pytest.mark.slow
def test_nobody_goes_on_where_all_have_left(launch) -> None:
    result = launch(LEAVES, "-np", "3", "--min-np", "1", "train.py", "all")
    assert result.code == 0 and "goes on" not in result.err, result.err


@pytest.mark.slow
def test_too_few_are_left_to_train_on(launch) -> None:
    result = launch(LEAVES, "-np", "3", "--min-np", "3", "train.py", "1")
    assert result.code == 1 and "worker 1 failed (ended too early, with exit code 0)" in result.err, result.err
    assert "goes on" not in result.err
