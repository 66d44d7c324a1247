"""`dadt run --launcher mpi`: workers are ranks of MPI, and all else is as ever."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
import torch
from harness import TESTS
from harness.checks import assert_equal, assert_near
from harness.mpis import MPICH_LIBRARY, shims
from harness.patience import SETTLE_SECONDS, await_that
from harness.run import await_end_of, is_running
from harness.scenarios import WARMUP, simulate

TRAIN = f"""
import os, sys
sys.path.insert(0, {str(TESTS)!r})
import torch
from harness import scenarios
torch.set_num_threads(1)
rank = int(os.environ["RANK"])
torch.save(scenarios.train("momentum", rank), open(f"rank{{rank}}.pt", "wb"))
"""
WAIT = """
import os, signal, sys, time
rank = os.environ["RANK"]
def ready(name="ready"):
    with open(name + rank + ".part", "w") as file: file.write(str(os.getpid()))
    os.rename(name + rank + ".part", name + rank)
{}
ready()
while True: time.sleep(600)
"""
DAEMON = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ready("daemon")
        while True: time.sleep(600)
    os._exit(0)
while not os.path.exists("daemon" + rank): time.sleep(0.01)
"""


@pytest.mark.parametrize(
    "mpirun", [pytest.param("mpirun.openmpi", marks=pytest.mark.slow), "mpirun.mpich"], indirect=True
)
def test_training_equals_the_definition(launch, tmp_path):
    torch.set_num_threads(1)
    result = launch(TRAIN, "-np", "2", "--warmup-steps", str(WARMUP), "train.py")
    assert result.code == 0, result.err
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    assert_equal(ranks[0], ranks[1], "replicas")
    assert_near(ranks[0], simulate("momentum", 2, "pipe"), "definition")


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_workers_are_ranks_of_mpi(launch, mpirun, tmp_path):
    env = {}
    if mpirun == "mpirun.mpich":
        # mpi4py from PyPI looks for the library by the name that it has outside of Debian.
        (tmp_path / "libmpi.so.12").symlink_to(MPICH_LIBRARY)
        env = {"LD_LIBRARY_PATH": str(tmp_path), "MPI4PY_MPIABI": "mpich"}
    result = launch(
        """
import os
from mpi4py import MPI
world = MPI.COMM_WORLD
print(world.rank == int(os.environ["RANK"]), world.size, world.allreduce(world.rank + 1))
""",
        **env,
    )
    assert result.code == 0, result.err
    assert sorted(result.out.splitlines()) == [b"[0] True 2 3", b"[1] True 2 3"]


def test_one_worker_is_started_too(launch):
    result = launch("print('here')", "-np", "1", "train.py")
    assert (result.code, result.out) == (0, b"[0] here\n"), result.err


def test_the_first_failure_is_the_cause(launch):
    result = launch("import os, sys, time\nsys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)")
    assert result.code == 7
    assert "dadt: worker 1 failed (exit code 7)" in result.err
    assert "mpirun" not in result.err


def test_a_killed_worker_is_named(start):
    run = start(WAIT.format(""))
    _, second = run.wait_for("ready0", "ready1")
    os.kill(second, signal.SIGKILL)
    result = run.finish()
    assert result.code == 128 + signal.SIGKILL
    assert "dadt: worker 1 " in result.err


def test_output_is_complete_whatever_it_is(launch):
    result = launch("""
import os, sys
data = bytes(range(256)) * 20000
os.write(2, b"to stderr\\n")
for start in range(0, len(data), 65536): os.write(1, data[start : start + 65536])
""")
    assert result.code == 0
    for rank in range(2):
        assert bytes(range(256)) * 20000 in result.log(rank).replace(b"to stderr\n", b"")
        assert b"to stderr\n" in result.log(rank)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_dadt_run_ends_all_gently(start, number, code):
    run = start(WAIT.format(f"signal.signal({int(number)}, lambda *_: (print('saved'), sys.exit(0)))"))
    workers = run.wait_for("ready0", "ready1")
    run.process.send_signal(number)
    result = run.finish()
    assert result.code == code
    assert sorted(result.out.splitlines()) == [b"[0] saved", b"[1] saved"], result.err
    await_end_of(*workers)


def test_kill_9_of_the_launcher_leaves_nothing(start):
    run = start(WAIT.format(DAEMON))
    pids = run.wait_for("ready0", "ready1", "daemon0", "daemon1")
    run.process.kill()
    run.finish()
    await_that(lambda: not any(is_running(pid) for pid in pids), "the workers' end", seconds=SETTLE_SECONDS)


@pytest.mark.alone
@pytest.mark.sample(3)
@pytest.mark.parametrize("who", ["agent", "mpirun", "shim"])
def test_kill_9_of_what_is_between_leaves_nothing(start, mpirun, who):
    run = start(WAIT.format(DAEMON))
    pids = run.wait_for("ready0", "ready1", "daemon0", "daemon1")
    os.kill(process_of(run, mpirun, who), signal.SIGKILL)
    result = run.finish()
    assert result.code != 0, result.err
    # Of an agent that was killed, its guard ends what is left, beside the launcher.
    await_that(lambda: not any(is_running(pid) for pid in pids), "the workers' end", seconds=SETTLE_SECONDS)


def process_of(run, mpirun: str, who: str) -> int:
    mark = {"agent": b"dadt.launch.agent", "mpirun": mpirun.encode(), "shim": b"dadt.launch.agent.shim"}[who]
    own = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in [*shims(run.job), *descendants(run.process.pid)]}
    exact = [pid for pid, line in own.items() if mark in line.split(b"\0")[0 if who == "mpirun" else slice(None)]]
    return min(exact)


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, children) for each in (child, *descendants(child))]


def test_no_command_line_shows_the_key(start):
    run = start(WAIT.format(""))
    run.wait_for("ready0", "ready1")
    note = Path(f"/proc/{shims(run.job)[0]}/environ").read_bytes().partition(b"DADT_SHIM=")[2].partition(b"\0")[0]
    key = json.loads(json.loads(note)["reach"])["key"]
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert len(key) == 64 and any("mpirun" in line for line in lines) and not any(key in line for line in lines)


def test_two_names_of_one_machine_are_told(launch, mpirun):
    if mpirun != "mpirun.openmpi":
        pytest.skip("MPICH takes two names for two hosts, which does no harm")
    result = launch("", "-H", "localhost:1,127.0.0.1:1", "train.py")
    assert result.code == 3
    assert "does -H name one machine twice" in result.err


def test_what_mpirun_says_is_shown(launch):
    result = launch("", "--mpi-args", "--nonsense", "-np", "2", "train.py")
    assert result.code == 3
    assert "nonsense" in result.err
    assert "mpirun ended with code" in result.err


def test_a_host_that_is_not_there_is_told(launch):
    result = launch("", "-H", "nowhere.invalid:1,localhost:1", "train.py")
    assert result.code == 3
    assert "Could not resolve hostname nowhere.invalid" in result.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--mpirun", "no-such-mpirun", "-np", "2"), "there is no no-such-mpirun in PATH"),
        (("--mpirun", sys.executable, "-np", "2"), "not Open MPI, MPICH or Intel MPI"),
        (("-H", "a,b"), "how many workers on a, b?"),
        (("-np", "1", "-H", "a:1,b:1"), "no worker is left for b"),
        (("-H", "[::1]:2"), "mpirun does not take ::1 for a host"),
    ],
)
def test_bad_input_is_told(launch, arguments, words):
    result = launch("", *arguments, "train.py")
    assert result.code == 2
    assert words in result.err


def test_a_dry_run_shows_mpirun(launch, mpirun):
    result = launch("", "--dry-run", "-np", "2", "train.py")
    assert result.code == 0
    assert mpirun in result.out.decode() and "dadt.launch.agent.shim" in result.out.decode()
