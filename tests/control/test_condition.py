"""What the kernel says of processes that make no steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from harness.patience import await_that

from dadt.control.condition import HELD, TEXTS, Conditions

TRACED = "import ctypes, os; ctypes.CDLL(None).ptrace(0, 0, 0, 0); print(flush=True); os.kill(os.getpid(), 19)"
"""Asks its parent to trace it, and stops as under a debugger's breakpoint."""
START = "print(flush=True); import time\n"


@pytest.fixture
def spawn() -> Iterator[Callable[[str], int]]:
    """spawn(code) -> pid of a Python that runs it; it has begun once it has printed a line."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(code: str) -> int:
        running.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))
        assert running[-1].stdout is not None and running[-1].stdout.readline()
        return running[-1].pid

    yield begin
    for process in running:
        os.kill(process.pid, signal.SIGKILL)  # not by its own method, for which a traced process that stops has ended
        process.communicate()


def await_condition(pid: int, kind: str) -> None:
    conditions = Conditions()
    await_that(lambda: conditions.look({3: pid}) == ({"3": kind} if kind else {}), kind or "nothing to tell")


def test_a_process_that_is_stopped_and_let_go_on(spawn: Callable[[str], int]) -> None:
    pid = spawn(START + "time.sleep(600)")
    await_condition(pid, "")
    os.kill(pid, signal.SIGSTOP)
    await_condition(pid, "stopped")
    os.kill(pid, signal.SIGCONT)
    await_condition(pid, "")


def test_a_process_under_a_debugger(spawn: Callable[[str], int]) -> None:
    await_condition(spawn(TRACED), "traced")


def test_one_that_computes_is_only_slow(spawn: Callable[[str], int]) -> None:
    await_condition(spawn(START + "while True: pass"), "busy")
    assert "busy" not in HELD and set(HELD) < set(TEXTS)


def test_of_one_that_has_ended_nothing_is_told() -> None:
    assert Conditions().look({0: 2**22 + 1}) == {}
