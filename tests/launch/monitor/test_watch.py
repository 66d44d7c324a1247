"""What is made of the frames that agents send: speeds, the slowest rank, the last line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dadt.control.frame import Frame
from dadt.launch.actions import Event, Outbox
from dadt.launch.hosts.host import Host
from dadt.launch.members.member import Member
from dadt.launch.members.node import Node
from dadt.launch.monitor.journal import Journal
from dadt.launch.monitor.watch import LINE_BYTES, Watch

NODE = Node(0, Host(name=""))


def watch_of(size: int) -> Watch:
    return Watch([Member(rank, seen=1000.0) for rank in range(size)], Outbox(), 1000.0, 1000.0)


def event(kind: str, facts: Mapping[str, Any], now: float = 1000.0, body: bytes = b"") -> Event:
    return Event(NODE, Frame(kind, dict(facts), body), now)


def train(watch: Watch, seconds: float, rate: float, waits: list[float]) -> float:
    """All ranks step together, `rate` times a second, and wait for these shares of the time. Returns the time."""
    now = 1000.0
    for tick in range(int(seconds * 5) + 1):
        now = 1000.0 + tick / 5
        for rank, wait in enumerate(waits):
            step = int(tick / 5 * rate)
            numbers = {"samples": 64.0 * step, "waited": wait * tick / 5, "clock": now + 50 * rank}
            watch.numbers(event("numbers", {"rank": rank, "step": step, "numbers": numbers}, now))
            watch.gauges[rank].member.step = step
            watch.gauges[rank].member.seen = now
    return now


def test_speeds_are_those_of_the_last_seconds() -> None:
    watch = watch_of(1)
    now = train(watch, 20.0, 10.0, [0.25])
    speed = watch.gauges[0].speed(now)
    assert speed is not None
    assert speed == pytest.approx((10.0, 640.0, 0.25), rel=0.05)
    assert watch.gauges[0].mean_speed() == pytest.approx((10.0, 640.0, 0.25), rel=0.05)
    assert watch.gauges[0].speed(now + 60.0) == (0.0, 0.0, 0.0)


def test_a_rank_slower_than_the_window_has_a_speed() -> None:
    watch = watch_of(1)
    for step in range(4):
        now = 1000.0 + 20.0 * step
        numbers = {"samples": 8.0 * step, "waited": 0.0, "clock": now}
        watch.numbers(event("numbers", {"rank": 0, "step": step, "numbers": numbers}, now))
    speed = watch.gauges[0].speed(now)
    assert speed is not None and speed.steps == pytest.approx(0.05)


def test_the_slowest_is_the_one_that_waits_least() -> None:
    watch = watch_of(4)
    now = train(watch, 6.0, 10.0, [0.3, 0.3, 0.05, 0.3])
    slowest = watch.slowest(now)
    assert slowest is not None and slowest.rank == 2
    assert [gauge.rank for gauge in watch.by_pace(now)] == [2, 0, 1, 3]


def test_nobody_is_slowest_among_equals() -> None:
    watch = watch_of(4)
    now = train(watch, 6.0, 10.0, [0.3, 0.28, 0.31, 0.3])
    assert watch.slowest(now) is None


def test_steps_that_were_not_read_at_once_make_nobody_slowest() -> None:
    watch = watch_of(4)
    now = train(watch, 6.0, 100.0, [0.3] * 4)
    watch.gauges[1].member.step -= 80
    assert watch.slowest(now) is None
    watch.gauges[1].member.step -= 100
    assert watch.slowest(now) is watch.gauges[1]


def test_the_slowest_is_the_one_that_does_not_ask_for_the_others() -> None:
    watch = watch_of(3)
    now = train(watch, 6.0, 10.0, [0.3] * 3)
    now += 4.0
    for rank in (0, 2):
        watch.gauges[rank].member.waiting.ask(starts=False, now=now)
    assert watch.gauges[0].member.waits(now) and not watch.gauges[1].member.waits(now)
    assert watch.slowest(now) is watch.gauges[1]


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        ([b"one\ntwo\n"], "two"),
        ([b"one\n", b"\n\n"], "one"),
        ([b"10%\r20%\r"], "20%"),
        (["Epoch 1 ━━━ 30/100\n        loss: 0.5".encode()], "Epoch 1 ━━━ 30/100"),
        ([b"\x1b[32mgreen\x1b[0m\ttab\n"], "green tab"),
        ([b"\x1b]0;title\x07text\n"], "text"),
        ([b"\xff\xfe bad \n"], "\ufffd\ufffd bad"),
        ([b"x" * 10000 + b" end\n"], "x" * (LINE_BYTES - 5) + " end"),
    ],
)
def test_the_last_line_is_readable(printed, line):
    watch = watch_of(1)
    for data in printed:
        watch.printed(event("out", {"rank": 0}, body=data))
    assert watch.gauges[0].line == line


def test_memory_and_exit_are_kept():
    watch = watch_of(2)
    watch.beat(event("beat", {"steps": {}, "memory": {"0": 300, "1": 200}}))
    watch.beat(event("beat", {"steps": {}, "memory": {"0": 100, "1": 250}}))
    watch.exit(event("exit", {"rank": 1, "code": -9, "step": 3, "peak_memory": 400, "stopped": False}))
    assert [gauge.peak_memory for gauge in watch.gauges] == [300, 400]
    assert [gauge.memory for gauge in watch.gauges] == [100, 0]
    assert watch.by_pace(1000.0)[0].code == -9


def test_a_journal_that_cannot_be_written_is_told_once_and_stops_nothing(tmp_path):
    told: list[str] = []
    journal = Journal(Path("/dev/full"), told.append)
    journal.write("start")
    journal.see("node1", Frame("started", {"rank": 0, "pid": 7}))
    journal.close()
    assert told == ["/dev/full is incomplete: No space left on device"]


def test_a_journal_keeps_events_and_no_more(tmp_path):
    journal = Journal(tmp_path / "events.jsonl", lambda text: pytest.fail(text))
    journal.see("node1", Frame("started", {"rank": 3, "pid": 7, "line": 2}))
    journal.see("node1", Frame("beat", {"steps": {}}))
    journal.see("node1", Frame("out", {"rank": 3}, b"text"))
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert event.pop("time") > 0
    assert event == {"kind": "started", "host": "node1", "rank": 3, "pid": 7}
