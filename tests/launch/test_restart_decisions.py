"""What follows an attempt to run a job, and which hosts the next one gets, without any process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dadt.config import Config
from dadt.errors import ConfigError, LaunchError, StartTimeout
from dadt.launch.actions import SayText
from dadt.launch.ending.failure import Ending, ErrorRecord, Failure
from dadt.launch.ending.outcome import Ended, Outcome
from dadt.launch.ending.restart import Restarts
from dadt.launch.hosts.discovery import ANSWER_SECONDS, Discovery
from dadt.launch.hosts.host import Host

HOSTS = [Host(name=name, slots=2) for name in ("h0", "h1")]
LOST = LaunchError("h0: the connection was closed")


class Between:
    """What is decided between the attempts of a job on two hosts, and all lines so far."""

    def __init__(self, hosts: list[Host] = HOSTS, *, changes: bool = False, **knobs: Any) -> None:
        self.now = 100.0
        self.discovery = Discovery(hosts, self.now, changes=changes)
        self.restarts = Restarts(Config(np=4, **{"max_restarts": 1, "start_timeout": 15.0, **knobs}), self.discovery)
        self.said: list[str] = []

    def look(self, seconds: float = 0.0) -> list[Host] | None:
        self.now += seconds
        found = self.restarts.hosts(self.now)
        self._note()
        return found

    def fails(self, error: Any = LOST, *, began: bool = True) -> bool:
        again = self.restarts.failed(error, HOSTS, self.now, began=began)
        self._note()
        return again

    def ends(self, kind: str, text: str, step: int = 3) -> bool:
        facts = {"type": kind, "message": text, "frames": [], "step": step, "secondary": False, "thread": ""}
        record = ErrorRecord.from_header({**facts, "time": 1.0, "around": [], "rank": 0})
        ending = Ending(rank=0, code=1, step=step, time=1.0, stopped=False, peak_memory=0, memory_limit=0,
                        memory_kills=0)  # fmt: skip
        failure = Failure(ending=ending, record=record, seconds=1.0, pid=1, host="h0", log=Path("log"))
        again = self.restarts.ended(Outcome(seconds=1.0, failure=failure))
        self._note()
        return again

    def _note(self) -> None:
        self.restarts.outbox.empty(lambda act: self.said.append(act.text) if isinstance(act, SayText) else None)


def test_what_was_never_started_is_not_started_again() -> None:
    between = Between()
    assert between.look() == HOSTS
    assert not between.fails(began=False)
    assert between.fails() and not between.fails()
    assert between.said == [f"{LOST}: restart 1 of 1"]
    last = LaunchError("h0: the connection was closed, and dadt run was told to end")
    last.is_last = True
    assert not Between().fails(last)
    assert not Between().fails(Ended(15)) and Between().fails(ConfigError("no room"))


def test_a_script_that_shards_begins_again_in_islands_once() -> None:
    between = Between(max_restarts=0, island="auto")
    assert between.restarts.island == "auto"
    assert between.ends("Sharded", "the script shards")
    assert between.restarts.island == "host" and between.said == ["the script shards"]
    assert not between.ends("Sharded", "the script shards")
    assert not Between(max_restarts=0).ends("Sharded", "the script shards")


def test_what_fails_alike_is_not_started_again() -> None:
    between = Between(max_restarts=5)
    assert between.ends("ValueError", "no", step=3) and between.ends("ValueError", "no", step=4)
    assert not between.ends("ValueError", "no", step=4)
    assert between.said[-1] == "attempts 2 and 3 failed alike: no restart"


def test_a_script_that_never_resumes_is_not_started_without_end() -> None:
    between = Between(max_restarts=2)
    assert between.ends("ValueError", "no")
    numbers = 0
    while between.ends("NotResumed", f"no array {numbers}"):
        numbers += 1
    assert numbers == 3  # of two attempts one has no snapshot, and counts


def test_after_a_failure_hosts_are_left_alone_for_a_while() -> None:
    between = Between()
    assert between.fails()
    assert between.look() is None and between.look(1.1) == HOSTS


def test_who_names_the_hosts_has_not_answered() -> None:
    """After a restart the last answer is too old, and its hosts are no lack."""
    between = Between(changes=True)
    between.now += 5.0
    assert between.fails()
    assert between.restarts.ask_seconds(between.now) == 0.0 and between.discovery.asks(between.now, 0.0)
    assert between.look() is None and between.look(3.0) is None
    assert between.said[-1] == "waiting for hosts: no answer yet to the question which there are"
    assert between.look(ANSWER_SECONDS) == HOSTS
    between = Between(changes=True, start_timeout=5.0)
    between.now += 5.0
    assert between.fails() and between.look() is None and between.look(5.1) == HOSTS


def test_too_few_hosts_are_waited_for() -> None:
    between = Between(HOSTS[:1])
    assert between.look() is None and between.look(3.0) is None
    assert between.said == ["waiting for hosts: h0 with room for 2 workers of 4"]
    with pytest.raises(StartTimeout, match=r"^h0 with room for 2 workers of 4 after --start-timeout 15 s$"):
        between.look(15.0)


def test_hosts_are_asked_for_a_last_time_before_the_job_gives_up() -> None:
    between = Between(HOSTS[:1], changes=True)
    assert between.look() is None and between.look(9.0) is None
    assert between.discovery.asks(between.now) and not between.discovery.take(HOSTS[:1])
    assert between.restarts.ask_seconds(between.now) == 9.0 and between.look(6.1) is None
    assert between.discovery.asks(between.now, between.restarts.ask_seconds(between.now))
    between.discovery.take(HOSTS)
    assert between.look() == HOSTS
    between.discovery.take(HOSTS[:1])
    assert between.look() is None and between.look(15.1) is None  # who is asked does not answer
    with pytest.raises(StartTimeout):
        between.look(ANSWER_SECONDS)


def test_what_ends_a_wait_says_whether_it_was_started_before() -> None:
    between = Between(HOSTS[:1])
    with pytest.raises(Ended, match="ended by SIGTERM; nothing was started"):
        between.restarts.kill()
    assert between.fails()
    with pytest.raises(Ended, match="ended by Ctrl-C; it was not started again"):
        between.restarts.signal({2})
