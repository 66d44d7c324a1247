"""What an agent decides, without any process: orders, frames of workers and times go in, actions come out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dadt.control.frame import Frame
from dadt.control.schema import LAUNCHER
from dadt.errors import DadtError
from dadt.launch.agent.actions import (
    AgentAction,
    AnswerLine,
    DumpStacks,
    FindHandlers,
    KillAll,
    SendBeat,
    SignalGroup,
    SignalProcess,
    TellLauncher,
    TerminateAll,
)
from dadt.launch.agent.host_job import MOST_PATIENCE, HostJob
from dadt.launch.agent.launcher_contact import FIRST_SECONDS, LauncherContact
from dadt.launch.agent.other_hosts import OtherHosts
from dadt.launch.agent.registry import Line, Saying
from dadt.launch.ending.processes import Process

FOLDER = Path("/tmp/dadt-0/job")
FACTS = {"step": 5, "time": 1.0, "peak_memory": 0, "memory_limit": 0, "memory_kills": 0}


class OneHost:
    """Two workers on one host, each with a line on which it listens, and all actions so far."""

    def __init__(self, **order: Any) -> None:
        workers = [{"rank": rank, "local_rank": rank - 4} for rank in (4, 5)]
        job = Frame("job", {"workers": workers, "adopt": 0.0, "secret": "00", **order})
        self.now = 100.0
        self.host = HostJob(job, FOLDER, self.now)
        self.lines = {rank: Line(rank, rank, Process(10 * rank, 1)) for rank in (4, 5)}
        self.actions: list[AgentAction] = []
        self.beats: list[AgentAction] = []
        for rank, line in self.lines.items():
            self.host.started(rank, line.process)
            self.host.registry.connected(line)
            self.hear(rank, "listen")

    def hear(
        self, rank: int, kind: str, owner_lives: bool = False, process: Process | None = None, **facts: Any
    ) -> None:
        line = self.lines[rank]
        frame = Frame(kind, {"rank": rank, "pid": 1, **facts})
        self.host.hear(Saying(line, frame, process or line.process, self.now, owner_lives))
        self.take()

    def order(self, kind: str, **facts: Any) -> None:
        self.host.order(Frame(kind, facts), self.now)
        self.take()

    def later(
        self, seconds: float, step: int = -1, left: tuple[int, ...] = (1,), *, launcher_gone: bool = False
    ) -> None:
        self.now += seconds
        steps = dict.fromkeys(self.lines, (step, 0.0))
        self.host.turn(self.now, steps, launcher_gone=launcher_gone)
        self.host.advance_stop(left, self.now)
        self.take()

    def take(self) -> None:
        self.host.outbox.empty(self._take)

    def _take(self, action: AgentAction) -> None:
        (self.beats if isinstance(action, SendBeat) else self.actions).append(action)

    def told(self, kind: str) -> list[Frame]:
        return [each.frame for each in self.actions if isinstance(each, TellLauncher) and each.frame.kind == kind]

    def answers(self, rank: int) -> list[Frame]:
        return [each.frame for each in self.actions if isinstance(each, AnswerLine) and each.number == rank]


@pytest.fixture
def world() -> OneHost:
    return OneHost()


def test_each_kind_that_the_launcher_may_send_has_its_row(world: OneHost) -> None:
    before_the_job_runs = {"look", "job"}
    assert world.host.orders.keys() == LAUNCHER.kinds.keys() - before_the_job_runs


def test_workers_are_stopped_gently_and_then_killed(world: OneHost) -> None:
    world.order("stop", grace=2.0, stacks=True)
    assert isinstance(world.actions[-1], DumpStacks)
    world.later(0.1)
    assert isinstance(world.actions[-1], DumpStacks), "nobody is stopped who still writes stacks"
    world.host.dumped([(4, 40, b"stack"), (5, 50, b"")])
    world.later(0.0)
    assert [frame.body for frame in world.told("stacks")] == [b"stack"]
    world.later(1.9)
    assert isinstance(world.actions[-1], TerminateAll)
    world.later(0.2)
    assert world.actions[-1] == KillAll((1,), spares_trackers=True)
    world.later(3.0, left=(7,))
    assert world.host.over and world.host.stop is not None and world.host.stop.stuck == (7,)


def test_the_launcher_gets_a_heartbeat_twice_a_second(world: OneHost) -> None:
    for _ in range(20):
        world.later(0.1)
    assert len(world.beats) == 4


def test_a_launcher_that_says_nothing_is_lost_but_for_the_time_in_which_the_agent_sleeps() -> None:
    contact = LauncherContact(now=0.0)
    contact.patience = 10.0
    assert not any(contact.is_lost(float(now)) for now in range(5))
    assert not contact.is_lost(100.0), "the agent has slept, and the launcher may have slept with it"
    assert not any(contact.is_lost(100.0 + seconds) for seconds in range(11))
    assert contact.is_lost(110.5)


def test_a_launcher_that_never_says_anything_is_lost() -> None:
    contact = LauncherContact(now=0.0)
    lost = [contact.is_lost(float(now)) for now in range(70)]
    assert lost.index(True) == FIRST_SECONDS + 1


def test_a_host_whose_workers_have_ended_is_over(world: OneHost) -> None:
    for rank in (4, 5):
        world.host.ended(rank, 0, FACTS)
    world.later(0.0, left=())
    assert [frame["rank"] for frame in world.told("exit")] == [4, 5]
    assert world.host.over and world.host.stop is not None and not world.host.stop.signalled


def test_workers_end_with_a_launcher_that_is_gone(world: OneHost) -> None:
    world.later(0.0, launcher_gone=True)
    assert isinstance(world.actions[-1], TerminateAll)


def test_ctrl_c_reaches_those_that_train_at_a_step_and_the_others_at_once(world: OneHost) -> None:
    world.hear(4, "claim")
    world.order("interrupt", grace=8.0)
    assert world.answers(4)[-1] == Frame("interrupt", {"patience": 2.0})
    assert [each for each in world.actions if isinstance(each, SignalGroup)] == [SignalGroup(5, 2)]


def test_a_process_that_listens_no_more_gets_the_signal_itself() -> None:
    world = OneHost(checkpoint={"number": 10, "grace": 40.0, "alone": True, "island": 1, "saves": 0})
    world.hear(4, "claim")
    world.host.unsent(4, Frame("save", {"patience": 0.0, "count": 0}))
    world.host.unsent(4, Frame("interrupt", {"patience": 2.0}))
    world.host.unsent(4, Frame("death", {"text": "rank 5 has ended"}))
    world.host.hung_up(5)
    world.host.unsent(5, Frame("interrupt", {"patience": 2.0}))
    world.take()
    process = world.lines[4].process
    signals = [each for each in world.actions if isinstance(each, SignalProcess)]
    assert signals == [SignalProcess(process, 10), SignalProcess(process, 2)]


def test_only_one_process_trains_as_a_rank(world: OneHost) -> None:
    world.hear(4, "claim")
    assert world.answers(4)[-1].kind == "claimed"
    world.hear(4, "claim", owner_lives=True, process=Process(41, 2))
    assert "rank 4 is already claimed by pid 40" in world.answers(4)[-1]["message"]
    world.hear(4, "claim", process=Process(42, 3))
    assert world.answers(4)[-1].kind == "claimed", "the first has ended"


def test_a_preempted_host_saves_and_names_who_cannot() -> None:
    world = OneHost(checkpoint={"number": 10, "grace": 40.0, "alone": True, "island": 1, "saves": 0})
    world.hear(4, "claim")
    world.host.told_to_end({15}, world.now)
    world.take()
    assert len(world.told("preempted")) == 1
    (find,) = (each for each in world.actions if isinstance(each, FindHandlers))
    world.host.save(find, living=[4, 5], heedless=[5])
    world.take()
    assert world.answers(4)[-1] == Frame("save", {"patience": 0.0, "count": 0})
    assert world.told("unheeded") == [Frame("unheeded", {"number": 10, "ranks": [5], "handled": False})]
    assert not any(isinstance(each, SignalProcess) for each in world.actions)
    world.later(39.0)
    assert not any(isinstance(each, TerminateAll) for each in world.actions)
    world.later(2.0)
    assert isinstance(world.actions[-1], TerminateAll)


@pytest.mark.parametrize(("trains", "heedless"), [((4,), ()), ((4, 5), (5,)), ((4, 5), ())])
def test_in_an_island_all_save_or_none(trains: Sequence[int], heedless: Sequence[int]) -> None:
    world = OneHost(checkpoint={"number": 10, "grace": 40.0, "alone": False, "island": 2, "saves": 0})
    for rank in trains:
        world.hear(rank, "claim")
    world.order("signal", number=10, saves=1)
    (find,) = (each for each in world.actions if isinstance(each, FindHandlers))
    world.host.save(find, living=[4, 5], heedless=heedless)
    world.take()
    asked = [rank for rank in trains if world.answers(rank)[-1].kind == "save"]
    assert asked == ([4, 5] if len(trains) == 2 and not heedless else [])
    assert not any(isinstance(each, SignalProcess) for each in world.actions)
    unheeded = [each.header for each in world.told("unheeded")]
    left_out = [{"number": 10, "ranks": sorted({4, 5} - set(heedless)), "handled": True}] if not asked else []
    assert unheeded == [{"number": 10, "ranks": [rank], "handled": False} for rank in heedless] + left_out


def test_all_ranks_count_the_orders_to_save_as_the_launcher_does() -> None:
    world = OneHost(checkpoint={"number": 10, "grace": 40.0, "alone": False, "island": 2, "saves": 3})
    world.hear(4, "claim")
    assert world.answers(4)[-1]["saves"] == 3
    for count in (4, 5):
        world.order("signal", number=10, saves=count)
        *_, find = (each for each in world.actions if isinstance(each, FindHandlers))
        world.host.save(find, living=[4, 5], heedless=[])
        world.take()
        # Of the first order nobody has heard: rank 4 was left out, as the other rank of its island did not train.
        if count == 4:
            world.hear(5, "claim")
            assert world.answers(5)[-1]["saves"] == 4
    told = [[frame for frame in world.answers(rank) if frame.kind == "save"] for rank in (4, 5)]
    assert told == [[Frame("save", {"patience": MOST_PATIENCE, "count": 5})]] * 2
    world.order("preempt")
    *_, find = (each for each in world.actions if isinstance(each, FindHandlers))
    assert find.saves == 6


def test_a_rank_waits_for_the_file_that_the_first_one_writes(world: OneHost) -> None:
    asks = {"path": "/x", "count": 1, "number": 1, "step": 3, "timeout": 60.0}
    world.hear(5, "await_save", **asks)
    assert not world.answers(5)
    world.hear(4, "saved", path="/x", count=1, number=1)
    assert world.answers(5) == [Frame("saved", {"verdict": "there"})]
    world.hear(5, "await_save", **{**asks, "path": "/y", "number": 2})
    world.later(0.0, step=4)
    assert world.answers(5)[-1] == Frame("saved", {"verdict": "write"}), "the first one is past that step"


def test_stacks_go_to_no_other_file(world: OneHost) -> None:
    with pytest.raises(DadtError, match="is no file for stacks"):
        world.hear(4, "stacks", path="/etc/stacks-1", signal=10)


def test_hosts_that_begin_send_their_first_heartbeats_at_once_and_soon_again() -> None:
    """The others may begin a moment later, and a way that fails before anything was heard is never missed."""
    others = OtherHosts(0, timeout=10.0)
    assert others.is_beat_due(0.0), "nobody is there yet"
    others.begin([{"index": 1, "address": "10.0.0.1", "port": 4000}], now=0.1)
    due = [tenth / 10 for tenth in range(1, 50) if others.is_beat_due(tenth / 10)]
    assert due == [0.1, 0.4, 0.7, 1.0, 1.3, 2.6, 3.9]
