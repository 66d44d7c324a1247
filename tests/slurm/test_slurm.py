"""`dadt run` inside an allocation: no list of hosts, one agent per node, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import stranger
from cluster import CORES, Cluster
from harness import ROOT, jobs, lightened
from harness.patience import PATIENCE, SETTLE_SECONDS, await_that
from harness.run import DADT, await_end_of, is_running, left_of, parent, write_script

from dadt.errors import ConfigError
from dadt.launch.hosts import slurm
from dadt.launch.hosts.host import Host
from dadt.launch.hosts.slurm import slurm_hosts, tasks_per_node

SHOW = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n"
FAIL = SHOW + "import sys; sys.exit(7 if os.environ['RANK'] == '3' else 0)\n"
SLEEP = """
import os, pathlib, signal, subprocess, time
name = os.environ["RANK"]
signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path("usr1-" + name).touch())
subprocess.Popen(["setsid", "sleep", "612"])
pathlib.Path("pid" + name).write_text(str(os.getpid()))
while True:
    time.sleep(0.1)
"""
TRAIN = """
import os, torch
torch.manual_seed(int(os.environ["RANK"]))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("weights", model.weight.sum().item(), flush=True)
"""
TWO = ("--nodes=2", "--ntasks-per-node=2")


def allocate(cluster: Cluster, folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`dadt run` with these arguments in an allocation of two nodes with two tasks each."""
    dadt = write_script(folder, script)
    return cluster.run("salloc", "--quiet", *TWO, *dadt, "run", *(arguments or ["train.py"]), cwd=folder)


def begin(
    cluster: Cluster, folder: Path, *arguments: str, alone: bool = False
) -> tuple[subprocess.Popen[str], list[int]]:
    """The same with workers that sleep, whose ids are returned. alone: as for Run."""
    dadt = write_script(folder, SLEEP, alone)
    process = cluster.start("salloc", "--quiet", *TWO, *dadt, "run", *arguments, "train.py", cwd=folder)
    paths = [folder / f"pid{rank}" for rank in range(4)]
    await_that(lambda: all(path.exists() and path.read_text() for path in paths), "the workers")
    return process, [int(path.read_text()) for path in paths]


def test_an_allocation_needs_no_list_of_hosts(cluster: Cluster, tmp_path: Path) -> None:
    done = allocate(cluster, tmp_path, SHOW)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank} n{rank // 2 + 1}] rank {rank} of 4" for rank in range(4)]
    assert re.match(r"dadt: job \w{4}: starting 2 agents \.\.\.", done.stderr)


def test_ranks_on_all_nodes_train_together(cluster: Cluster, tmp_path: Path) -> None:
    done = allocate(cluster, tmp_path, TRAIN)
    assert done.returncode == 0, done.stderr
    weights = re.findall(r"weights (\S+)", done.stdout)
    assert len(weights) == 4
    assert len(set(weights)) == 1
    assert "NOT distributed" not in done.stderr


def test_a_worker_sees_which_job_it_is_in_and_not_that_it_would_be_a_task(cluster: Cluster, tmp_path: Path) -> None:
    show = "import os, json; print(json.dumps({k: v for k, v in os.environ.items() if 'SLURM' in k or 'DADT_R' in k}))"
    done = allocate(cluster, tmp_path, show)
    for line in done.stdout.splitlines():
        env = json.loads(line.partition("] ")[2])
        assert env["SLURM_JOB_ID"].isdigit()
        assert env["SLURMD_NODENAME"] == line.partition("]")[0][-2:]
        assert not {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID", "DADT_REACH"} & env.keys()


def test_the_workers_get_all_cores_of_the_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """A step inherits --cpus-per-task by this variable, and would have the cores of one worker."""
    script = "import os, subprocess\nif os.environ['RANK'] == '0': subprocess.run(['scontrol', 'show', 'step'])"
    dadt = write_script(tmp_path, script)
    options = (*TWO, "--cpus-per-task=2", "--mem-per-cpu=50")
    done = cluster.run(
        "salloc", "--quiet", *options, *dadt, "run", "train.py", cwd=tmp_path, env={"SRUN_CPUS_PER_TASK": "2"}
    )
    assert done.returncode == 0, done.stderr
    assert f"CPUs={2 * CORES} Tasks=2 Name=dadt" in done.stdout


def test_the_job_ends_with_the_exit_code_of_its_cause(cluster: Cluster, tmp_path: Path) -> None:
    done = allocate(cluster, tmp_path, FAIL)
    assert done.returncode == 7
    assert "dadt: worker 3 failed (exit code 7)" in done.stderr
    assert "  host    n2, pid " in done.stderr
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{write_script(tmp_path, FAIL)[0]} run train.py\n")
    assert cluster.batch(*TWO, "job.sh", cwd=tmp_path) == [7]


@pytest.mark.slow
def test_an_array_has_a_job_for_each_of_its_tasks(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint('seed', sys.argv[1], flush=True)")
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{DADT[0]} run train.py $SLURM_ARRAY_TASK_ID\n")
    options = (*TWO, "--array=1-3", "--mem=100", "--output=out.%a")
    assert cluster.batch(*options, "job.sh", cwd=tmp_path) == [0, 0, 0]
    for number in (1, 2, 3):
        text = (tmp_path / f"out.{number}").read_text()
        assert text.count(f"seed {number}") == 4, text
    assert len(list((tmp_path / "dadt-logs").iterdir())) == 3


@pytest.mark.slow
def test_the_example_trains_as_a_task_of_an_array(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(DADT[0]).parent}{os.pathsep}{os.environ['PATH']}"
    job, options = "examples/slurm/job.sh", ("--array=2", "--time=5", "--output=out")
    codes = cluster.batch(*options, job, "--epochs", 1, cwd=tmp_path, env={"PATH": path})
    text = (tmp_path / "out").read_text()
    assert codes == [0], text
    assert "dadt: 4 workers on 2 hosts" in text
    assert "NOT distributed" not in text
    assert (tmp_path / "mnist-2.pt").exists()


def test_fewer_nodes_than_were_allocated(cluster: Cluster, tmp_path: Path) -> None:
    done = allocate(cluster, tmp_path, SHOW, "--exclude", "n1", "train.py")
    assert sorted(done.stdout.splitlines()) == ["[0] rank 0 of 2", "[1] rank 1 of 2"]
    assert "2 workers on n2" in done.stderr


def test_python_that_is_missing_is_told_for_each_node(cluster: Cluster, tmp_path: Path) -> None:
    done = allocate(cluster, tmp_path, SHOW, "--python", "/no/python", "train.py")
    assert done.returncode == 3
    for name in ("n1", "n2"):
        assert (
            f"dadt: {name}: /no/python cannot be run there (No such file or directory) -> --python PATH" in done.stderr
        )


def test_dadt_that_is_missing_is_told(cluster: Cluster, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    done = allocate(cluster, tmp_path, SHOW, "--python", str(python), "train.py")
    assert done.returncode == 3
    reason = f"dadt is not installed for {python} there -> pip install it"
    # Whichever node is first: srun may end the other one before it can say the same.
    told = [done.stderr.count(f"dadt: {name}: {reason}") for name in ("n1", "n2")]
    ended = [done.stderr.count(f"dadt: {name}: srun ended the agent, because another") for name in ("n1", "n2")]
    assert 1 in told and [a + b for a, b in zip(told, ended, strict=True)] == [1, 1], done.stderr


def test_what_srun_complains_of_is_told(cluster: Cluster, tmp_path: Path) -> None:
    """Here: of an allocation that is over."""
    env = {"SLURM_JOB_ID": "999999", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "2"}
    done = cluster.run(*write_script(tmp_path, SHOW), "run", "train.py", cwd=tmp_path, env=env)
    assert done.returncode == 3
    assert "dadt: n1: srun: Unable to confirm allocation for job 999999: Invalid job id specified" in done.stderr


def test_a_dry_run_shows_the_one_srun_and_starts_nothing(cluster: Cluster, tmp_path: Path) -> None:
    done = allocate(cluster, tmp_path, SHOW, "--dry-run", "train.py")
    assert done.returncode == 0, done.stderr
    for name in ("n1", "n2"):
        assert f"{name}: srun --job-name=dadt --nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=n1,n2 " in done.stdout
    assert "--kill-on-bad-exit=1" in done.stdout
    assert not (tmp_path / "dadt-logs").exists()


def test_srun_in_front_of_dadt_run_is_told(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.run("srun", "-n2", *write_script(tmp_path, SHOW), "run", "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "dadt: srun has started dadt run 2 times: call it once, without srun" in done.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job_on_all_nodes(cluster: Cluster, tmp_path: Path, number: int) -> None:
    process, workers = begin(cluster, tmp_path)
    os.kill(launcher(process.pid), number)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number, err
    await_end_of(*workers)


def test_nothing_outlives_scancel(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLEEP)
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\nexec {DADT[0]} run train.py\n")
    cluster.run("sbatch", "--output=out", *TWO, "job.sh", cwd=tmp_path)
    await_that(lambda: all((tmp_path / f"pid{rank}").exists() for rank in range(4)), "the workers")
    (job,) = cluster.jobs()
    cluster.run("scancel", job)
    cluster.await_idle()
    (name,) = os.listdir(tmp_path / "dadt-logs")
    await_that(lambda: not left_of(name), "the end of the workers", seconds=SETTLE_SECONDS)
    await_that(lambda: "SIGTERM" in (tmp_path / "out").read_text(), "the launcher's last words")


def test_nothing_outlives_a_launcher_that_was_killed(cluster: Cluster, tmp_path: Path) -> None:
    process, workers = begin(cluster, tmp_path, alone=True)
    os.kill(launcher(process.pid), signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    await_end_of(*workers)


def test_an_agent_that_was_killed_is_told(cluster: Cluster, tmp_path: Path) -> None:
    process, workers = begin(cluster, tmp_path)
    os.kill(parent(workers[3]), signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 3, err
    assert re.search(r"dadt: n2: the agent has ended \(srun: Killed\)", err), err
    await_end_of(*workers)


def test_the_others_train_on_without_an_agent_that_was_killed(cluster: Cluster, tmp_path: Path) -> None:
    script = """
import hashlib, os, time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).pow(2).mean().backward()
    optimizer.step()
    if step == 20 and os.environ["RANK"] == "1":
        open("ready", "w").write(str(os.getppid()))
        while True: time.sleep(1)
"""
    dadt = write_script(tmp_path, script)
    two = ["--nodes=2", "--ntasks-per-node=1"]
    process = cluster.start("salloc", "--quiet", *two, *dadt, "run", "--min-np", "1", "train.py", cwd=tmp_path)
    await_that((tmp_path / "ready").exists, "step 20")
    await_that(lambda: (tmp_path / "ready").read_text(), "the agent's number")
    os.kill(int((tmp_path / "ready").read_text()), signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert "training goes on without it" in err


@pytest.mark.slow
def test_a_signal_that_slurm_sends_reaches_the_workers(cluster: Cluster, tmp_path: Path) -> None:
    """As --signal=USR1@120 does before the time is over."""
    process, workers = begin(cluster, tmp_path)
    (job,) = cluster.jobs()
    cluster.run("scancel", "--signal=USR1", job)
    await_that(lambda: all((tmp_path / f"usr1-{rank}").exists() for rank in range(4)), "the signal")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    assert all(map(is_running, workers))
    os.kill(launcher(process.pid), signal.SIGTERM)
    process.communicate(timeout=PATIENCE)


@pytest.mark.slow
def test_a_stranger_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """Who speaks to the port at which the launcher awaits its agents, as well as one can without the key."""
    (tmp_path / "train.py").write_text(lightened(jobs.TRAIN.format("")))
    process = cluster.start("salloc", "--quiet", *TWO, *DADT, "run", *jobs.SEED, "train.py", cwd=tmp_path)
    await_that(lambda: all((tmp_path / f"half{rank}").exists() for rank in range(4)), "half of the training")
    try:
        dadt = launcher(process.pid)
        before = jobs.held([dadt])
        listening = [each for each in psutil.Process(dadt).net_connections("inet") if each.status == psutil.CONN_LISTEN]
        ports = {each.laddr.port for each in listening}  # also of salloc, which has left some open
        (port,) = (port for port in ports if stranger.greeted("127.0.0.1", port))
        assert not stranger.knock("127.0.0.1", port) and not stranger.reflect("127.0.0.1", port)
        stranger.flood("127.0.0.1", port)
        await_that(lambda: jobs.held([dadt])[0][0] <= before[0][0] + 3, "the end of the flood")
        jobs.assert_flat(before, jobs.held([dadt]))
    finally:
        (tmp_path / "attacked").touch()
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert len(jobs.weights(out)) == 1
    assert "a connection from 127.0.0.1 was turned away: it has another key" in jobs.refusals(tmp_path)


def launcher(salloc: int) -> int:
    """The `dadt run` that salloc has started."""
    children = Path(f"/proc/{salloc}/task/{salloc}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


@pytest.mark.parametrize(
    ("text", "counts"), [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("1,4(x2)", [1, 4, 4]), ("2(x1)", [2])]
)
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


ALLOCATION = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a[1-2]"}


@pytest.mark.parametrize(
    ("env", "slots"),
    [
        ({"SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "3(x2)"}, [3, 3]),
        ({"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1"}, [2, 1]),
        ({"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}, [0, 0]),
        ({"SLURM_TASKS_PER_NODE": "64(x2)"}, [0, 0]),
        ({}, [0, 0]),
    ],
    ids=["tasks", "uneven", "one-each", "cores-taken-for-tasks", "none"],
)
def test_slots_are_the_tasks_or_as_many_as_gpus(
    env: dict[str, str], slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "_expand", lambda nodes: ["a1", "a2"])
    assert slurm_hosts({**ALLOCATION, **env}) == [
        Host(name=name, slots=count) for name, count in zip(("a1", "a2"), slots, strict=True)
    ]


def test_tasks_that_do_not_fit_the_nodes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_expand", lambda nodes: ["a1", "a2"])
    for text, sentence in [("2(x3)", "counts 3 nodes of 2"), ("two", "'two' is not understood")]:
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            slurm_hosts({**ALLOCATION, "SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": text})


def test_outside_an_allocation_there_are_no_hosts() -> None:
    assert slurm_hosts({}) is None


@pytest.mark.slow
def test_srun_starts_ranks_of_mpi(cluster, tmp_path):
    """MPICH's: Open MPI has no two nodes on one machine."""
    found = next(iter(Path("/usr/lib").glob("*/libmpich.so.12")), None)
    if found is None or find_spec("mpi4py") is None:
        pytest.skip("needs MPICH and mpi4py")
    (tmp_path / "libmpi.so.12").symlink_to(found)
    (tmp_path / "train.py").write_text(lightened(TRAIN))
    done = cluster.run(
        *("salloc", "--quiet", *TWO, *DADT, "run", "--executor", "mpi", "--launcher", "slurm", "train.py"),
        cwd=tmp_path,
        env={"LD_LIBRARY_PATH": str(tmp_path), "MPI4PY_LIBMPI": str(found)},
    )
    assert done.returncode == 0, done.stderr
    assert "4 workers on 2 hosts, executor mpi" in done.stderr
    assert len({line.partition("] ")[2] for line in done.stdout.splitlines()}) == 1
