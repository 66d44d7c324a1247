"""Ranks that an mpirun has started for a `dadt run` that is gone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.patience import PATIENCE, await_that

from dadt.control.connection import Reach
from dadt.launch.agent.shim import NOTE

START_TIMEOUT = 600.0
DAEMON = "import subprocess, sys; own = subprocess.Popen(sys.argv[1:]); print(own.pid, flush=True); own.wait()"
SHIM = [sys.executable, "-m", "dadt.launch.agent.shim"]
pytestmark = pytest.mark.alone


@pytest.fixture
def env() -> Iterator[dict[str, str]]:
    """The variables of a rank 1 of two, whose launcher has listened at a port where nobody listens now."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody else can listen there meanwhile
        reach = Reach(addresses=["127.0.0.1"], port=closed.getsockname()[1], key=b"k" * 32, silence=5.0)
        note = {"job": f"gone{os.getpid()}", "shares": [2], "reach": reach.to_text(), "timeout": START_TIMEOUT}
        ranks = {f"OMPI_COMM_WORLD_{name}": value for name, value in {"SIZE": "2", "LOCAL_SIZE": "2"}.items()}
        yield {**os.environ, **ranks, **place(1), NOTE: json.dumps(note)}


def place(rank: int) -> dict[str, str]:
    return {f"OMPI_COMM_WORLD_{name}": str(rank) for name in ("RANK", "LOCAL_RANK", "NODE_RANK")}


def test_the_first_rank_of_a_host_does_not_wait_for_a_launcher_that_has_ended(env) -> None:
    result = subprocess.run(SHIM, env={**env, **place(0)}, stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
    assert result.returncode == 3
    assert "dadt: rank 0 on " in result.stderr and "the launcher was not reached at 127.0.0.1" in result.stderr


def test_other_ranks_do_not_wait_for_an_agent_that_nobody_starts(env) -> None:
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, *SHIM],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert daemon.stdout is not None and daemon.stderr is not None
    shim = int(daemon.stdout.readline())
    await_that(lambda: catches(shim, signal.SIGCHLD), "a shim that waits for its agent")
    daemon.kill()
    assert "dadt: rank 1 on " in (said := daemon.stderr.read()) and "what has started this rank has ended" in said
    daemon.stdout.close()
    daemon.stderr.close()
    daemon.wait(PATIENCE)


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal."""
    line = next(each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("SigCgt"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
