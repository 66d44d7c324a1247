"""A process is known by more than its pid, which another one may have once it has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from harness.patience import PATIENCE, await_that

from dadt.launch.ending.processes import Process

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
