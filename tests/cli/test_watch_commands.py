"""dadt ps, logs, stacks and kill, against running jobs, dead launchers and jobs that are not there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import forkserver
from harness.patience import PATIENCE, await_that
from harness.run import FOLDERS, Run, await_end_of, is_running, left_of

from dadt_cli.terminal import console
from dadt_cli.terminal.table import fitting

TRAIN = """\
import os, signal, sys, time
from dadt.control.agent_client import Control
from dadt.world import World
control = Control.connect(World.from_env())
rank = int(os.environ["RANK"])
control.claim()
{}
control.progress(7 + rank, samples=70, waited=0.1, clock=1.0)
print(f"hello of {{rank}}", flush=True)
def ready():
    with open(f"part{{rank}}", "w") as file: file.write(str(os.getpid()))
    os.rename(f"part{{rank}}", f"ready{{rank}}")
ready()
def deep_inside():
    while not os.path.exists("go"): time.sleep(0.02)
deep_inside()
print(f"end of {{rank}}", flush=True)
control.close()
"""
OFFER = """\
import faulthandler
from pathlib import Path
path = Path(control.world.agent).with_name(f"stacks-{os.getpid()}")
file = path.open("wb")
faulthandler.register(signal.SIGRTMAX - 3, file)
control.stacks(path, signal.SIGRTMAX - 3)"""
IGNORE = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def dadt(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([forkserver.dadt(), *arguments], cwd=cwd, capture_output=True, text=True, timeout=PATIENCE)


def begin(start, script: str = "", *arguments: str) -> Run:
    run: Run = start(TRAIN.format(script), *(arguments or ("-np", "2", "train.py", "--lr", "0.1")))
    run.workers = run.wait_for("ready0", "ready1")
    return run


def told_of(run: Run) -> str:
    """The job's own line: others may run as well."""
    (line,) = [line for line in dadt("ps").stdout.splitlines() if line.startswith(run.job)]
    return line


@pytest.mark.alone
def test_ps_lists_the_job_with_its_steps_and_logs(start):
    run = begin(start)
    await_that(lambda: "7-8" in told_of(run), "the steps")
    line = told_of(run)
    logs = run.folder / "dadt-logs" / run.job
    assert re.fullmatch(rf"{run.job}  \d\d:\d\d:\d\d +1 host x 2 +7-8  running +train.py --lr 0.1 +{logs}", line)


def test_ps_of_a_job_lists_its_ranks(start):
    run = begin(start)
    await_that(lambda: dadt("ps", run.job).stdout.count("MiB  at step") == 2, "steps and memory")
    lines = dadt("ps", run.job).stdout.splitlines()
    assert lines[0].split()[:4] == ["RANK", "HOST", "PID", "STEP"]
    for rank, line in enumerate(lines[1:]):
        assert line.split()[:4] == [str(rank), "-", str(run.workers[rank]), str(7 + rank)]
        assert re.search(r"\d+ MiB  at step", line)


@pytest.mark.alone
def test_ps_tells_how_jobs_have_ended(start, tmp_path):
    def column(job: str) -> str:
        lines = dadt("ps", "--all", cwd=tmp_path).stdout.splitlines()
        return next(line for line in lines if line.startswith(job))

    ended = {}
    for script, how in (("print('x')", "done"), ("import sys; sys.exit(3)", "failed, exit code 3")):
        known = set(ended)
        assert start(script, "-np", "2", "train.py").finish().code == (3 if "exit" in script else 0)
        job = next(path.name for path in (tmp_path / "dadt-logs").iterdir() if path.name not in known)
        ended[job] = how
    for job, how in ended.items():
        logs = f"{tmp_path}/dadt-logs/{job}"
        assert re.match(rf"{job}  \S+( \S+)?  1 host x 2 +[-0]  {how} +train.py +{logs}$", column(job))
        told = dadt("ps", job, cwd=tmp_path)
        assert told.returncode == 0
        assert re.fullmatch(
            rf"job {job} has ended at \S+( \S+)?: {how}; dadt report dadt-logs/{job} says how it went\n", told.stdout
        )
        for command in ("kill", "stacks"):
            done = dadt(command, job, cwd=tmp_path)
            assert done.returncode == 2 and f"job {job} has ended" in done.stderr and how in done.stderr
    (tmp_path / "dadt-logs" / job / "report.json").write_text("[" * 100_000)
    (tmp_path / "dadt-logs" / job / "events.jsonl").write_bytes(b"\xff\n[]\n")
    assert "end not known" in column(job)
    assert dadt("ps", "--all", "--log-dir", "nowhere", cwd=tmp_path).stdout.count(str(tmp_path)) == 0


@pytest.mark.parametrize(("width", "head"), [(80, "JOB  STATE  LOGS"), (15, "JOB  STATE"), (8, "JOB  S…")])
def test_a_table_fits_a_terminal(monkeypatch, width, head):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr(console, "size", lambda: (width, 24))
    names = ["JOB", "STATE", "LOGS"]
    assert fitting(names, [["abcd", "runs", "/a/b"]], names, ["LOGS"])[0].split() == head.split()


def test_ps_shows_who_was_lost(start):
    run = begin(start, "", "-np", "2", "--min-np", "1", "train.py")
    await_that(lambda: "7-8" in told_of(run), "the steps")
    os.kill(run.workers[0], signal.SIGKILL)
    await_that(lambda: "lost" in dadt("ps", run.job).stdout, "the loss")
    line = told_of(run)
    assert re.search(r" 8 +running, 1 lost ", line)
    lost, left = dadt("ps", run.job).stdout.splitlines()[1:]
    assert re.search(r"lost: was killed by signal 9 \(SIGKILL\), \d+ s ago$", lost)
    assert "lost" not in left


BUSY = """\
import json, os, threading, time, torch
def work():
    def below(n): return json.loads('[[1, 2], {"a": [1]}]') if n == 0 else below(n - 1)
    while True:
        for n in range(30): below(n)
for _ in range(2): threading.Thread(target=work, daemon=True).start()
with open(f"part{os.environ['RANK']}", "w") as file: file.write(str(os.getpid()))
os.rename(f"part{os.environ['RANK']}", f"ready{os.environ['RANK']}")
def deep_inside():
    while not os.path.exists("go"): time.sleep(0.02)
deep_inside()
"""


@pytest.mark.slow
def test_stacks_of_threads_that_run_harm_nobody(start):
    """A signal's handler, which walks through their frames while they change, soon crashes the process."""
    run = start(BUSY)
    run.wait_for("ready0", "ready1")
    for _ in range(12):
        said = dadt("stacks", run.job)
        assert said.returncode == 0, said.stderr
        assert said.stdout.count(" in deep_inside") == 2 and " in work" in said.stdout
    (run.folder / "go").touch()
    assert run.finish().code == 0


def test_ps_is_quick_and_imports_no_torch(tmp_path):
    modules = ", ".join(f"dadt_cli.jobs.{name}" for name in ("ps", "logs", "stacks", "kill"))
    code = f"import sys, {modules}; print('torch' in sys.modules, 'rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "False False\n", done.stderr


@pytest.mark.parametrize("command", ["stacks", "kill", "ps"])
def test_an_unknown_job_is_one_sentence_with_those_that_run(start, command):
    run = begin(start)
    done = dadt(command, "zzzz")
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"dadt: job zzzz: there is no such job; on this machine run .*\n", done.stderr)
    assert run.job in done.stderr


def test_logs_come_with_their_rank(start):
    run = begin(start)
    assert sorted(dadt("logs", run.job).stdout.splitlines()) == ["[0] hello of 0", "[1] hello of 1"]
    assert dadt("logs", run.job, "--rank", "1").stdout == "[1] hello of 1\n"
    (run.folder / "go").touch()
    run.finish()
    # It runs no more, so its folder has to be found where it was launched.
    assert sorted(dadt("logs", "latest", cwd=run.folder).stdout.splitlines()) == sorted(
        f"[{rank}] {word} of {rank}" for rank in (0, 1) for word in ("hello", "end")
    )
    elsewhere = dadt("logs", run.job, cwd=run.folder.parent)
    assert elsewhere.returncode == 2
    assert f"job {run.job}: it does not run here and has no logs in dadt-logs" in elsewhere.stderr
    assert dadt("logs", run.job, "--log-dir", str(run.folder / "dadt-logs")).returncode == 0


def test_logs_are_followed_until_the_job_ends(start):
    run = begin(start)
    follower = subprocess.Popen([forkserver.dadt(), "logs", "-f", run.job], stdout=subprocess.PIPE, text=True)
    assert follower.stdout is not None
    assert sorted(follower.stdout.readline() for _ in range(2)) == ["[0] hello of 0\n", "[1] hello of 1\n"]
    (run.folder / "go").touch()
    rest, _ = follower.communicate(timeout=PATIENCE)
    assert sorted(rest.splitlines()) == ["[0] end of 0", "[1] end of 1"]
    assert follower.returncode == 0 and run.finish().code == 0


def test_logs_refuse_ranks_that_are_none(start):
    run = begin(start)
    assert dadt("logs", run.job, "--rank", "0,7").stderr.startswith("dadt: --rank 7: ")
    assert dadt("logs", run.job, "--rank", "x").stderr.startswith("dadt: --rank x: give ranks as 0,3-5")


def test_stacks_of_every_rank_twice(start):
    run = begin(start, "import torch")
    for _ in range(2):
        done = dadt("stacks", run.job)
        assert done.returncode == 0, done.stderr
        heads = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
        assert [head.split(":")[0] for head in heads] == [f"rank {r}, pid {run.workers[r]}" for r in (0, 1)]
        assert done.stdout.count("in deep_inside") == 2
    assert dadt("stacks", run.job, "--rank", "1").stdout.count("in deep_inside") == 1
    assert all(map(is_running, run.workers))
    (run.folder / "go").touch()
    assert run.finish().code == 0


@pytest.mark.slow
def test_ranks_that_cannot_tell_their_stacks_are_named(start):
    run = begin(start, "if rank == 0:\n    " + OFFER.replace("\n", "\n    "))
    os.kill(run.workers[0], signal.SIGSTOP)
    try:
        begun = time.monotonic()
        done = dadt("stacks", run.job)
        assert time.monotonic() - begun < 6.0
        text = done.stdout
        assert f"process {run.workers[0]} did not answer within 2 s: it is stopped" in text
        assert "it has not imported torch yet, with dadt hooked in, and so cannot tell" in text
    finally:
        os.kill(run.workers[0], signal.SIGCONT)


@pytest.mark.slow
def test_stacks_after_stacks_hold_a_failure_only(start):
    run = begin(start, OFFER)
    assert dadt("stacks", run.job).returncode == 0
    os.kill(run.workers[1], signal.SIGKILL)
    result = run.finish()
    assert result.code == 137
    text = (result.logs / result.job / "rank0.stacks").read_text()
    assert text.count("deep_inside") == 1


@pytest.mark.parametrize(("extra", "grace"), [("", "5"), (IGNORE, "0.5")])
def test_kill_ends_the_job_and_names_what_it_ended(start, extra, grace):
    run = begin(start, extra, "-np", "2", "--grace", grace, "train.py")
    done = dadt("kill", run.job)
    assert done.returncode == 0, done.stderr
    names = ", ".join(f"rank {rank} (pid {pid})" for rank, pid in enumerate(run.workers))
    assert done.stdout == f"job {run.job} has ended: {names}\n"
    assert not any(map(is_running, run.workers))
    result = run.finish()
    assert result.code == 143
    assert "stopping the workers after dadt kill" in result.err
    assert "dadt: ended by signal 15 (SIGTERM); all workers stopped" in result.err


def test_kill_touches_no_other_job(start):
    first = begin(start)
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, "DADT_JOB": "0000"})
    try:
        assert dadt("kill", first.job).returncode == 0
        assert other.poll() is None
        line = next(line for line in dadt("ps").stdout.splitlines() if line.startswith("0000"))
        assert re.match(r"0000  \d\d:\d\d:\d\d +0 here +-  no launcher on this machine", line)
        assert dadt("kill", "0000").stdout == "job 0000 has ended on this machine: 1 other process\n"
        assert other.wait(PATIENCE) == -signal.SIGTERM
    finally:
        other.kill()
        other.wait()


@pytest.mark.alone
@pytest.mark.slow
def test_a_launcher_that_does_not_answer_is_killed_too(start):
    run = begin(start)
    os.kill(run.process.pid, signal.SIGSTOP)
    assert "does not answer" in dadt("ps").stdout
    done = dadt("kill", run.job)
    assert done.returncode == 0, done.stderr
    assert f"its launcher (pid {run.process.pid}) does not answer: it is killed, too" in done.stdout
    await_that(lambda: left_of(run.job) == [], "the end of the workers")
    assert run.finish().code == -signal.SIGKILL


@pytest.mark.alone
def test_what_a_dead_launcher_and_agent_left_is_found_and_killed(start):
    daemon = """\
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(f"daemon{rank}", "w").write(str(os.getpid()))
        while True: time.sleep(600)
    os._exit(0)
"""
    run = begin(start, daemon)
    daemons = run.wait_for("daemon0", "daemon1")
    agent = run.agent
    os.kill(agent, signal.SIGSTOP)
    run.process.kill()
    run.process.wait()
    try:
        line = next(line for line in dadt("ps").stdout.splitlines() if line.startswith(run.job))
        assert " 2 here " in line and "no launcher on this machine" in line
        done = dadt("kill", run.job)
        assert done.returncode == 0, done.stderr
        assert f"job {run.job} has ended on this machine: rank 0 (pid {run.workers[0]})" in done.stdout
        await_end_of(*run.workers, *daemons, agent)
        assert run.job not in dadt("ps").stdout
    finally:
        if is_running(agent):
            os.kill(agent, signal.SIGCONT)


@pytest.mark.alone
def test_a_job_without_its_launcher_here_is_listed_by_its_agent(start):
    run = begin(start)
    # As on another host than the launcher's: no socket of it.
    hidden = FOLDERS / run.job / "hidden"
    os.kill(run.process.pid, signal.SIGSTOP)  # it would make its folder again
    os.rename(FOLDERS / run.job, FOLDERS / "dadt-hidden")
    try:
        line = next(line for line in dadt("ps").stdout.splitlines() if line.startswith(run.job))
        assert (
            "no launcher on this machine" in line
            and "train.py --lr 0.1" in line
            and "2 here" in line
            and " 7-8 " in line
        )
    finally:
        os.rename(FOLDERS / "dadt-hidden", FOLDERS / run.job)
        os.kill(run.process.pid, signal.SIGCONT)
    assert not hidden.exists()
