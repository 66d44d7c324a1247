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
import functools, json, os, subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from benchmarks import many_hosts
from benchmarks.many_hosts import Scene, averages
from dadt.comm.executors.meet import Within
many_hosts.Config = functools.partial(many_hosts.Config, verbose=1)
Within.say = lambda self, text: print(text, file=sys.stderr, flush=True)
dropped = []
class Watched(many_hosts.Network):
    def close(self):
        for host in self._hosts:
            ask = ["nsenter", f"--net=/proc/{{{{os.getpid()}}}}/fd/{{{{host}}}}", "tc", "-s", "-j", "qdisc", "show"]
            found = json.loads(subprocess.run(ask, capture_output=True, text=True, check=True).stdout)
            dropped.append(sum(queue["drops"] for queue in found))
        super().close()
many_hosts.Network = Watched
found = averages(Scene({{}}), {{}}, {{}})
print(json.dumps([found, dropped]))
"""
"""In a process of its own, which forks a rank for each host. It tells how many packets the queue before the link of
each host has dropped, too."""


@pytest.fixture
def averages(network_possible: None, tmp_path: Path):
    def measure(scene: str, rounds: int, said: str = "") -> tuple[Averages, list[int]]:
        (tmp_path / "run.py").write_text(RUN.format(scene, ["tcp"], rounds))
        command = [forkserver.python(), "run.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr
        assert said in done.stderr
        found, dropped = json.loads(done.stdout)
        return Averages(*found["tcp"]), dropped

    return measure


def test_the_host_with_a_slow_link_moves_less(averages) -> None:
    size = 5_000_000
    found, _ = averages(f"4, 200, slow=40, size={size}", 4)
    # With equal parts each sends 1.5 times the bytes in each of five averages. In the first one nothing is known, and
    # with the best parts the slow host sends all bytes once: 5.5 times the bytes. Other work on this machine slows the
    # others' links, but hardly to the speed of the slow one, at which parts would be equal.
    slow = found.sent[3] / size
    assert 5.3 <= slow <= 7.0, found


def test_many_hosts_do_not_overflow_the_queue_before_a_link(averages) -> None:
    found, dropped = averages("8, 100, size=2_000_000", 6)
    # Some 20 packets while links are not known. Without a limit it is 300, and averages take 1.3 to 2 times as long.
    assert sum(dropped) < 100, (found, dropped)


@pytest.mark.slow
def test_hosts_behind_a_thin_link_average_in_groups_and_say_so(averages) -> None:
    found, _ = averages("4, 100, uplink=50, size=10_000_000", 10, "averages of 1 MiB and more go in groups of 2")
    # What lies between the two racks carries all values once each way, and not twice.
    assert max(found.seconds[5:]) < 0.7 * min(found.seconds[:3]), found
