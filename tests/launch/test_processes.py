"""A process is known by more than its pid, which another one may have once it has ended."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

import pytest
from harness.patience import PATIENCE, await_that

from dadt.errors import LaunchError
from dadt.launch.agent.worker import Worker
from dadt.launch.ending import processes
from dadt.launch.ending.processes import Process, members

SLEEP = "import os, sys, time; os.write(1, b'.'); sys.stdin.read(1); {}"
AGAIN = "os.execv(sys.executable, [sys.executable, '-c', \"import os, time; os.write(1, b'.'); time.sleep(600)\"])"


def started(after: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SLEEP.format(after)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(1) == b"."
    return process


def test_one_that_has_replaced_itself_is_the_same() -> None:
    with started(AGAIN) as process:
        before = Process.of(process.pid)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.read(1) == b"." and Process.of(process.pid) == before and before.is_alive
        before.signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == -signal.SIGTERM
        assert not before.is_alive


def test_another_one_with_the_same_pid_gets_no_signal() -> None:
    with started("time.sleep(600)") as process:
        earlier = Process(process.pid, Process.of(process.pid).started - 1)
        assert not earlier.is_alive
        earlier.signal(signal.SIGKILL)
        Process.of(process.pid).signal(signal.SIGSTOP)
        await_that(lambda: os.waitpid(process.pid, os.WUNTRACED | os.WNOHANG)[0], "the stop, before which no end came")
        assert process.poll() is None
        process.kill()


def test_descendants_are_found_where_proc_hides_processes_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with hidepid=1, where /proc/1/stat cannot be read."""
    read = processes.stat_fields
    monkeypatch.setattr(processes, "stat_fields", lambda folder: [] if folder.name == "1" else read(folder))
    with subprocess.Popen(["sleep", "600"], env={}) as process:
        assert process.pid in members("DADT_JOB=none", descendants=True)
        process.kill()


@pytest.mark.parametrize("left", [0, 2])
def test_a_worker_for_which_no_descriptors_are_left_is_refused_in_a_sentence(left: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(left + 1)]
    for each in free:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[left], hard))
    try:
        with pytest.raises(LaunchError, match="Too many open files"):
            Worker.start(0, ["true"], {}, "/", 0)
        for each in [os.dup(0) for _ in range(left)]:  # nothing has stayed open
            os.close(each)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
