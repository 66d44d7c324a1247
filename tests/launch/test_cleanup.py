"""Whatever ends the job, nothing of it is left. The fixture counts processes and folders after every test."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from harness.patience import PATIENCE, SETTLE_SECONDS, await_that
from harness.run import DADT, FOLDERS, await_end_of, is_running, left_of, parent

from dadt.control import job_folder
from dadt.errors import LaunchError

WAIT = """\
import os, signal, sys, time
rank = os.environ["RANK"]
def ready(name="ready"):
    with open(name + rank + ".part", "w") as file: file.write(str(os.getpid()))
    os.rename(name + rank + ".part", name + rank)
{}
ready()
while True: time.sleep(600)
"""
IGNORE = "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)"
FINISH = """\
while not os.path.exists("go"): time.sleep(0.01)
"""
DAEMON = """\
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ready("daemon")
        {}
        while True: time.sleep(600)
    os._exit(0)
while not os.path.exists("daemon" + rank): time.sleep(0.01)
"""
EVERY_KIND = f"if rank == '0':\n    {IGNORE}\n" + DAEMON.format(f"if rank == '0': {IGNORE}")
"""Workers and daemons that ignore what asks them to end, and some that do not."""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_dadt_run_ends_all(start, number, code):
    run = start(WAIT.format(""))
    workers = run.wait_for("ready0", "ready1")
    run.process.send_signal(number)
    result = run.finish()
    assert result.code == code
    assert "\nTraceback" not in result.err
    assert ("KeyboardInterrupt" in result.err) == (number == signal.SIGINT)  # scripts get Ctrl-C as under python
    await_end_of(*workers)


def test_a_hangup_does_not_end_what_runs_under_nohup(tmp_path):
    (tmp_path / "train.py").write_text(WAIT.format("").replace("while True: time.sleep(600)", "") + FINISH)
    command = ["nohup", *DADT, "run", "-np", "1", "train.py"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    await_that(lambda: (tmp_path / "ready0").exists(), "the worker")
    run.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    run.communicate(timeout=PATIENCE)
    assert run.returncode == 0
    assert (tmp_path / "dadt-logs").exists()


def test_workers_may_end_gently_on_ctrl_c(start):
    script = WAIT.format("signal.signal(signal.SIGINT, lambda *_: (print('saved'), sys.exit(0)))")
    run = start(script)
    run.wait_for("ready0", "ready1")
    run.process.send_signal(signal.SIGINT)
    result = run.finish()
    assert result.code == 130
    assert sorted(result.out.splitlines()) == [b"[0] saved", b"[1] saved"]


def test_a_second_ctrl_c_does_not_wait(start):
    run = start(
        WAIT.format("signal.signal(signal.SIGINT, lambda *_: ready('asked'))"), "-np", "2", "--grace", "60", "train.py"
    )
    workers = run.wait_for("ready0", "ready1")
    run.process.send_signal(signal.SIGINT)
    run.wait_for("asked0", "asked1")
    assert all(is_running(pid) for pid in workers)
    run.process.send_signal(signal.SIGINT)
    result = run.finish()
    assert result.code == 130
    await_end_of(*workers)


@pytest.mark.alone
def test_kill_9_of_dadt_run_leaves_nothing(start):
    run = start(WAIT.format(EVERY_KIND))
    workers = run.wait_for("ready0", "ready1", "daemon0", "daemon1")
    job, agent = run.job, run.agent
    run.process.kill()
    run.process.wait()
    await_that(lambda: not left_of(job), "the end of the workers", seconds=SETTLE_SECONDS)
    await_that(lambda: not is_running(agent), "the end of the agent", seconds=SETTLE_SECONDS)
    await_end_of(*workers)
    # By the agent, or by what outlives it to tidy up.
    await_that(lambda: not (FOLDERS / job).exists(), "the end of its folder", seconds=SETTLE_SECONDS)


@pytest.mark.alone
def test_kill_9_of_the_agent_leaves_nothing_and_is_told(start):
    run = start(WAIT.format(EVERY_KIND))
    workers = run.wait_for("ready0", "ready1", "daemon0", "daemon1")
    agent = run.agent
    os.kill(agent, signal.SIGKILL)
    result = run.finish()
    assert result.code == 3
    assert f"the agent of this host (pid {agent}) was killed by signal 9 (SIGKILL)" in result.err
    await_end_of(*workers)
    assert left_of(result.job) == []


def test_an_agent_that_is_told_to_end_is_no_success(start):
    run = start(WAIT.format(""))
    workers = run.wait_for("ready0", "ready1")
    os.kill(parent(workers[0]), signal.SIGTERM)
    result = run.finish()
    assert result.code == 3
    assert "was told to end by signal 15 (SIGTERM)" in result.err
    await_end_of(*workers)


def test_a_stopped_worker_is_ended_too(start):
    run = start(WAIT.format(""))
    workers = run.wait_for("ready0", "ready1")
    os.kill(workers[0], signal.SIGSTOP)
    os.kill(workers[1], signal.SIGKILL)
    assert run.finish().code == 137
    await_end_of(workers[0])


@pytest.mark.slow
def test_a_stopped_agent_does_not_hold_up_the_end(start):
    run = start(WAIT.format(""))
    workers = run.wait_for("ready0", "ready1")
    os.kill(parent(workers[0]), signal.SIGSTOP)
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish().code in (130, 143)
    await_end_of(*workers)


@pytest.mark.parametrize("clear", [False, True])
def test_grandchildren_do_not_survive_a_failure(start, clear):
    # Without its environment, only the agent's being the subreaper finds it.
    sleep = f"os.execve('{sys.executable}', ['python', '-c', 'import time; time.sleep(600)'], {{}})"
    daemon = DAEMON.format(sleep if clear else IGNORE)
    run = start(WAIT.format(daemon))
    workers = run.wait_for("ready0", "ready1")
    daemons = run.wait_for("daemon0", "daemon1")
    os.kill(workers[1], signal.SIGKILL)
    assert run.finish().code == 137
    await_end_of(*workers, *daemons)


def test_grandchildren_do_not_survive_a_good_end(start):
    script = WAIT.format(DAEMON.format(""))
    assert script.endswith("while True: time.sleep(600)\n")
    run = start(script.rpartition("while True")[0])
    daemons = run.wait_for("daemon0", "daemon1")
    assert run.finish().code == 0
    await_end_of(*daemons)


def test_a_worker_dies_with_the_worker_that_started_dadt_inside_it(start, tmp_path):
    (tmp_path / "inner.py").write_text(WAIT.format(""))
    command = f"[{sys.executable!r}, '-m', 'dadt_cli', 'run', '-np', '1', '--log-dir', 'inner', 'inner.py']"
    run = start(f"import subprocess; subprocess.run({command})", "-np", "1", "train.py")
    (inner,) = run.wait_for("ready0")
    run.process.send_signal(signal.SIGINT)
    assert run.finish().code == 130
    await_that(lambda: not is_running(inner), "the end of the inner worker", seconds=SETTLE_SECONDS)


@pytest.mark.parametrize("target", ["launcher", "agent", "worker"])
def test_semaphores_of_spawned_children_are_released(start, target):
    # The children ignore SIGTERM, so they are killed; whoever removes their semaphores must not be killed with them.
    script = """\
import multiprocessing, os, signal, sys, time
def sleep(lock):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open("child" + os.environ["RANK"], "w") as file: file.write(str(os.getpid()))
    time.sleep(600)
if __name__ == "__main__":
    lock = multiprocessing.get_context("spawn").Lock()
    with open("name" + os.environ["RANK"], "w") as file: file.write(lock._semlock.name)
    multiprocessing.get_context("spawn").Process(target=sleep, args=(lock,)).start()
    time.sleep(600)
"""
    run = start(script)
    children = run.wait_for("child0", "child1")
    names = ["/dev/shm/sem." + (run.folder / f"name{rank}").read_text().lstrip("/") for rank in (0, 1)]
    assert all(os.path.exists(name) for name in names)
    worker = parent(children[0])
    os.kill({"launcher": run.process.pid, "agent": parent(worker), "worker": worker}[target], signal.SIGKILL)
    run.finish()
    await_that(lambda: not any(is_running(pid) for pid in children), "the end of the children", seconds=SETTLE_SECONDS)
    await_that(lambda: not any(os.path.exists(name) for name in names), f"the end of {names}", seconds=SETTLE_SECONDS)


def test_the_folder_of_a_dead_job_is_removed_by_the_next(launch):
    dead = FOLDERS / "dead"
    dead.mkdir(parents=True, exist_ok=True)
    (dead / "pulse").write_bytes(b"")
    assert launch("", "-np", "1", "train.py").code == 0
    assert not dead.exists()


def test_jobs_at_the_same_time_have_different_ids_and_do_not_end_each_other(start, tmp_path):
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, "DADT_JOB": "0000"}
    )
    try:
        first = start(WAIT.format(""), "-np", "1", "--log-dir", "first", "train.py")
        (worker,) = first.wait_for("ready0")
        second = start("", "-np", "1", "train.py")
        assert second.finish().code == 0
        assert is_running(worker) and is_running(other.pid)
        first.process.send_signal(signal.SIGINT)
        assert first.finish().code == 130
        assert is_running(other.pid)
    finally:
        other.kill()
        other.wait()


@pytest.mark.slow
def test_a_suspended_launcher_goes_on_where_it_was(start, tmp_path):
    script = "import os, time\nopen('ready', 'w').write('1')\nwhile not os.path.exists('go'): time.sleep(0.01)"
    run = start(script, "-np", "1", "--orphan-timeout", "2", "train.py")
    run.wait_for("ready")
    os.kill(run.process.pid, signal.SIGSTOP)
    time.sleep(4.0)  # the pause itself is what is tested
    os.kill(run.process.pid, signal.SIGCONT)
    (tmp_path / "go").touch()
    result = run.finish()
    assert result.code == 0, result.err


@pytest.mark.slow
def test_a_prologue_does_not_outlive_the_job(start, tmp_path):
    run = start("", "-np", "1", "--prologue", "echo $$ > shell; sleep 345.6", "train.py")
    (shell,) = run.wait_for("shell")
    run.process.send_signal(signal.SIGTERM)
    assert run.finish().code == 143
    await_that(lambda: not is_running(shell), "the end of the prologue", seconds=SETTLE_SECONDS)


SAVES = """
import os, signal, time, torch
rank = os.environ["RANK"]
def end(number, frame):
    if rank == "1":
        raise RuntimeError("the other one is gone")
    time.sleep(4)
    open("saved", "w").close()
    os._exit(0)
signal.signal(signal.SIGINT, end)
with open("ready" + rank, "w") as file:  # closed by a destructor, in which nothing can be raised, it would warn
    file.write(str(os.getpid()))
while True: time.sleep(0.01)
"""


def test_workers_keep_their_time_when_the_user_ends_the_job(start, tmp_path) -> None:
    """Also where one of them fails meanwhile."""
    run = start(SAVES, "-np", "2", "--grace", "30", "train.py")
    run.wait_for("ready0", "ready1")
    run.process.send_signal(signal.SIGINT)
    assert run.finish().code == 130
    assert (tmp_path / "saved").exists()


WRITES = """
import os, time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step, last = 0, 1 << 30
while step < last:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with open("now.txt", "w") as file:
        file.write(str(step))
    if last < 1 << 30:  # nothing is removed any more
        assert open("now.txt").read() == str(step)
    torch.save(model.state_dict(), "last.pt")
    if os.path.exists("stop"):
        last = int(open("stop").read())
    time.sleep(0.02)
    step += 1
print("ends")
"""


def take_away(path, to):
    """At once, so that a script never finds half of it."""
    path.rename(to / f"taken-{time.monotonic_ns()}")


def test_a_job_outlives_the_removal_of_its_folder(start, tmp_path):
    """As by a cleaner of /tmp, whole and piece by piece; and a job that begins meanwhile takes nothing of it."""
    run = start(WRITES, "-np", "2", "train.py")
    run.wait_for("now.txt")
    own = [FOLDERS / run.job, FOLDERS / f"{run.job}.0"]
    for folder in own:
        take_away(folder, tmp_path)
    await_that(
        lambda: (own[0] / "launcher").exists() and (own[1] / "agent.1").exists(), "the folders", seconds=SETTLE_SECONDS
    )
    for folder in own:
        for path in folder.iterdir():
            take_away(path, tmp_path)
    await_that(
        lambda: (own[0] / "launcher").exists() and (own[1] / "agent.1").exists(), "the sockets", seconds=SETTLE_SECONDS
    )
    job_folder.remove_stale()  # as each job does when it begins
    assert all(folder.exists() for folder in own)
    now: list[int] = []
    await_that(lambda: (text := (run.folder / "now.txt").read_text()) and not now.append(int(text)), "a step")
    (run.folder / "half").write_text(str(now[-1] + 100))
    (run.folder / "half").rename(run.folder / "stop")
    result = run.finish()
    assert result.code == 0, result.err
    assert result.out.count(b"ends") == 2
    assert "was removed while the job runs" in result.err and "hint" not in result.err
    assert not any(folder.exists() for folder in own)


def test_cleaners_leave_a_held_folder_alone(tmp_path):
    folder = job_folder.Folder.join("0001")
    try:
        inside = folder.path / "kept" / "file"
        inside.parent.mkdir()
        inside.touch()
        for path in (inside, inside.parent):
            os.utime(path, (1.0, 2.0))
        with pytest.raises(BlockingIOError):  # what systemd-tmpfiles tries before it looks into a folder
            descriptor = os.open(folder.path, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
        folder.freshen()
        for path in (inside, inside.parent):
            assert time.time() - path.stat().st_atime < 60 and path.stat().st_mtime == 2.0
        shutil.rmtree(inside.parent)
        job_folder.remove_stale()
        assert folder.path.exists() and job_folder.is_held(folder.path)
    finally:
        folder.remove()
    assert not folder.path.exists()


def test_a_folder_that_is_open_to_others_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    assert job_folder.private(tmp_path / "new").stat().st_mode & 0o777 == 0o700
    for mode in (0o777, 0o1777, 0o750, 0o701):
        (tmp_path / "new").chmod(mode)
        with pytest.raises(LaunchError, match="is open to other users"):
            job_folder.private(tmp_path / "new")
    for name in ("file", "link"):
        with pytest.raises(LaunchError, match="is no folder"):
            job_folder.private(tmp_path / name)
