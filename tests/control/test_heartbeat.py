"""Signs of life between hosts: who counts as silent, what a stranger can do to that, and what the user is told."""

from __future__ import annotations

import hashlib
import hmac
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.journal import whole_lines
from harness.patience import PATIENCE, await_that
from harness.run import Run

from dadt.config import Config
from dadt.errors import ConfigError
from dadt.launch.agent.host_heartbeat import HostHeartbeat

SECRET = bytes(range(32))
ADDRESSES = ("127.0.0.1", "127.0.0.2")
TIMEOUT = 0.6
SLEEP = """
import os, time
with open(f"pid{os.environ['RANK']}.new", "w") as file: file.write(str(os.getpid()))
os.rename(f"pid{os.environ['RANK']}.new", f"pid{os.environ['RANK']}")
while not os.path.exists("end"): time.sleep(0.05)
"""
TRAIN = """
import os, time, torch
torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1_000_000):
    optimizer.zero_grad(); model(torch.randn(2, 4)).sum().backward(); optimizer.step()
    time.sleep(0.01)
    if step == 10:
        with open(f"pid{os.environ['RANK']}", "w") as file: file.write(str(os.getpid()))
    if os.path.exists("end") and step % 100 == 0: os._exit(0)
"""
WRONG = "lladdr 02:00:00:00:00:99 dev eth0 nud permanent"
"""Frames to this address arrive nowhere, and nobody is told."""


class Pair:
    """Two hosts, driven by the test."""

    def __init__(self) -> None:
        self.hearts = [HostHeartbeat(SECRET, index, address, TIMEOUT) for index, address in enumerate(ADDRESSES)]
        hosts = [
            {"index": index, "address": ADDRESSES[index], "port": heart.port} for index, heart in enumerate(self.hearts)
        ]
        for heart in self.hearts:
            heart.begin(hosts)
        self.told: list[tuple[int, str]] = []

    def drive(self, *which: int, until: Callable[[], bool]) -> None:
        """Let these hosts go on until something is so."""

        def turn() -> None:
            for index in which:
                self.hearts[index].read()
                self.told += [(index, frame.kind) for frame in self.hearts[index].turn()]
            time.sleep(0.01)

        await_that(until, lambda: self.told, meanwhile=turn)

    def drive_for(self, *which: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.drive(*which, until=lambda: time.monotonic() >= end)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for heart in made.hearts:
        heart.close()


def test_silence_is_told_once_and_its_end_too(pair: Pair) -> None:
    pair.drive_for(0, 1, seconds=2 * TIMEOUT)
    assert pair.told == []
    pair.drive(0, until=lambda: (0, "silent") in pair.told)
    pair.drive_for(0, seconds=TIMEOUT)
    assert pair.told == [(0, "silent")]
    pair.drive(0, 1, until=lambda: (0, "heard") in pair.told)
    assert pair.told == [(0, "silent"), (0, "heard")]  # the other one was away itself, and blames nobody


def test_a_host_that_was_never_heard_is_not_watched(pair: Pair) -> None:
    pair.drive_for(0, seconds=3 * TIMEOUT)
    assert pair.told == [(0, "unheard")]


def test_a_stranger_cannot_speak_for_a_silent_host(pair: Pair) -> None:
    """Who sees all datagrams and sends from the right place: forged, cut, replayed, turned around."""
    pair.drive_for(0, 1, seconds=TIMEOUT)
    heart = pair.hearts[1]
    signs = [
        forged(SECRET[::-1], 1, 0, 1 << 60),  # another secret
        forged(SECRET, 0, 1, 1 << 60),  # what the listener itself says to the other
        forged(SECRET, 1, 2, 1 << 60),  # for a third host
        forged(SECRET, 1, 0, 1),  # one that it has sent, once more
        forged(SECRET, 1, 0, 1 << 60)[:-1],
        forged(SECRET, 1, 0, 1 << 60) + b"\0",
        b"",
        os.urandom(48),
    ]
    place = (ADDRESSES[0], pair.hearts[0].port)

    def attack() -> bool:
        for sign in signs:
            heart._socket.sendto(sign, place)
        return (0, "silent") in pair.told

    pair.drive(0, until=attack)
    heart._socket.sendto(forged(SECRET, 1, 0, 1 << 60), place)
    pair.drive(0, until=lambda: (0, "heard") in pair.told)  # the forger here does know how


def forged(secret: bytes, sender: int, receiver: int, counter: int) -> bytes:
    sign = struct.pack(">IIQ", sender, receiver, counter)
    return sign + hmac.digest(hmac.digest(secret, b"dadt heartbeat", "sha256"), sign, hashlib.sha256)


def test_a_flood_costs_bounded_work_and_hides_nobody(pair: Pair) -> None:
    pair.drive_for(0, 1, seconds=TIMEOUT)
    place = (ADDRESSES[0], pair.hearts[0].port)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for _ in range(500):
            stranger.sendto(bytes(48), place)
    before = waiting(pair.hearts[0])
    pair.hearts[0].read()
    assert 0 < waiting(pair.hearts[0]) < before  # others get their turn before all is read
    pair.drive_for(0, 1, seconds=TIMEOUT)
    assert pair.told == []


def waiting(heart: HostHeartbeat) -> int:
    """Bytes of memory that datagrams take which are not read yet."""
    port = f":{heart.port:04X} "
    [line] = [line for line in Path("/proc/net/udp").read_text().splitlines() if port in line]
    return int(line.split()[4].split(":")[1], 16)


def test_a_time_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--heartbeat-timeout 1\.0: must be 2 s or more, or 0"):
        Config(heartbeat_timeout=1.0)


def pids(run: Run) -> list[int]:
    return run.wait_for("pid0", "pid1")


def await_signs(*workers: int) -> None:
    """Until each host has got datagrams."""

    def all_heard() -> bool:
        return all(_received(pid) > 2 for pid in workers)

    await_that(all_heard, "heartbeats")


def _received(pid: int) -> int:
    lines = [line.split() for line in Path(f"/proc/{pid}/net/snmp").read_text().splitlines() if line.startswith("Udp:")]
    return int(lines[1][lines[0].index("InDatagrams")])


def cut(worker: int, other: int) -> None:
    """What the worker's host sends to the other (by number from 1) goes nowhere from now on."""
    _ip(worker, f"neigh replace 10.77.0.{other} {WRONG}")


def heal(worker: int, other: int) -> None:
    _ip(worker, f"neigh del 10.77.0.{other} dev eth0")


def _ip(worker: int, words: str) -> None:
    subprocess.run(["nsenter", "-t", str(worker), "-n", "ip", *words.split()], check=True, timeout=PATIENCE)


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    path = run.folder / "dadt-logs" / run.job / "events.jsonl"
    return [line for line in whole_lines(path) if line["kind"] == kind]


ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="networks can be made by root only")


@ROOT
def test_a_way_that_carries_no_data_is_told_and_so_is_its_return(start: Callable[..., Run]) -> None:
    run = start(SLEEP, "-np", "2", "--simulate-hosts", "2", "--heartbeat-timeout", "2", "train.py")
    first, second = pids(run)
    await_signs(first, second)
    cut(second, 1)
    await_that(lambda: len(events(run, "link")) == 1, "the word on the link")
    heal(second, 1)
    await_that(lambda: len(events(run, "link")) == 2, "the word on its return")
    agent = int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGSTOP)
    await_that(lambda: len(events(run, "silent")) == 2, "the other host to notice that this one is silent")
    os.kill(agent, signal.SIGCONT)
    await_that(lambda: len(events(run, "heard")) == 2, "both to hear each other")
    (run.folder / "end").touch()
    result = run.finish()
    assert result.code == 0, result.err
    told = [line for line in result.err.splitlines() if "sim0 " in line and "ready" not in line]
    assert len(told) == 2, told
    assert told[0].startswith("dadt: warning: sim0 has heard nothing from sim1 over 10.77.0.2 (eth0) for ")
    assert told[0].endswith(" s; both still answer the launcher, but no heartbeat comes through between them")
    assert told[1].startswith("dadt: sim0 and sim1 hear each other again, after ")
    silences = [(line["host"], line["peer"]) for line in events(run, "silent")]
    assert silences == [("sim0", 1), ("sim1", 0)]  # the agent that was stopped has blamed nobody


@pytest.mark.slow
@ROOT
def test_a_link_that_stays_silent_is_the_cause(start: Callable[..., Run]) -> None:
    more = ("--heartbeat-timeout", "2", "--timeout", "6", "--stall-warning", "4")
    run = start(TRAIN, "-np", "2", "--simulate-hosts", "2", *more, "train.py")
    first, second = pids(run)
    await_signs(first, second)
    cut(first, 2)
    cut(second, 1)
    result = run.finish()
    assert result.code == 1, result.err
    assert " is unreachable, as sim0 and sim1 have heard nothing from each other over 10.77.0.1 (eth0)" in result.err
    block = result.err[result.err.index("dadt: the way between sim0 and sim1 failed after ") :]
    assert "  cause   sim0 and sim1 have heard nothing from each other over " in block
    assert "but no heartbeat comes through between them\n" in block


@ROOT
@pytest.mark.slow
def test_a_cut_of_five_seconds_is_survived_without_a_word(start: Callable[..., Run]) -> None:
    run = start(TRAIN, "-np", "2", "--simulate-hosts", "2", "train.py")
    first, second = pids(run)
    await_signs(first, second)
    cut(first, 2)
    cut(second, 1)
    time.sleep(5.0)  # the fault itself
    heal(first, 2)
    heal(second, 1)
    (run.folder / "end").touch()
    result = run.finish()
    assert result.code == 0, result.err
    assert "nothing from" not in result.err and not events(run, "link")
