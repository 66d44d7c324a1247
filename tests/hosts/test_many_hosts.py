"""Averages among simulated hosts with slow links."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from harness import ROOT, forkserver
from harness.patience import PATIENCE

from benchmarks.many_hosts import Averages

RUN = f"""
import functools, json, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from benchmarks import many_hosts
from benchmarks.many_hosts import Scene, averages
from dadt.comm.executors.meet import Within
many_hosts.Config = functools.partial(many_hosts.Config, verbose=1)
Within.say = lambda self, text: print(text, file=sys.stderr, flush=True)
print(json.dumps(averages(Scene({{}}), {{}}, {{}})))
"""
"""In a process of its own, which forks a rank for each host."""


@pytest.fixture
def averages(network_possible: None, tmp_path: Path):
    def measure(scene: str, contenders: list[str], rounds: int, said: str = "") -> list[Averages]:
        (tmp_path / "run.py").write_text(RUN.format(scene, contenders, rounds))
        command = [forkserver.python(), "run.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr
        assert said in done.stderr
        return [Averages(*json.loads(done.stdout)[name]) for name in contenders]

    return measure


def test_the_host_with_a_slow_link_moves_less(averages) -> None:
    size = 5_000_000
    (found,) = averages(f"4, 200, slow=40, size={size}", ["tcp"], 4)
    # With equal parts each sends 1.5 times the bytes in each of five averages. In the first one nothing is known, and
    # with the best parts the slow host sends all bytes once.
    slow = found.sent[3] / size
    assert 5.3 <= slow <= 6.7, found
    # The others share what it leaves by how fast each was seen to be, which other work on this machine changes.
    assert min(found.sent[:3]) > found.sent[3], found


def test_many_hosts_do_not_overflow_the_queue_before_a_link(averages) -> None:
    tcp, gloo = averages("8, 100, size=2_000_000", ["tcp", "gloo"], 6)
    # The shortest times, since other tests run. Where queues overflow, tcp takes 1.3 to 2 times as long as the ring.
    assert min(tcp.seconds[2:]) < 1.2 * min(gloo.seconds), (tcp, gloo)


@pytest.mark.slow
def test_hosts_behind_a_thin_link_average_in_groups_and_say_so(averages) -> None:
    (found,) = averages(
        "4, 100, uplink=50, size=10_000_000", ["tcp"], 10, "averages of 1 MiB and more go in groups of 2"
    )
    # What lies between the two racks carries all values once each way, and not twice.
    assert max(found.seconds[5:]) < 0.7 * min(found.seconds[:3]), found
