"""What the launcher decides, without any process: events and times go in, actions come out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dadt.config import Config
from dadt.control.frame import Frame
from dadt.control.schema import AGENT
from dadt.errors import LaunchError
from dadt.launch.actions import Action, Event, SayText, SendFrame
from dadt.launch.hosts.host import Host
from dadt.launch.hosts.slot import Slot
from dadt.launch.job import Job
from dadt.launch.members.node import Node

ENDED = {"time": 1.0, "step": 5, "peak_memory": 0, "memory_limit": 0, "memory_kills": 0, "stopped": False}


class World:
    """A job of one worker on each of these hosts, and all actions so far."""

    def __init__(self, hosts: int, **knobs: Any) -> None:
        self.now = 100.0
        self.nodes = [Node(n, Host(name=f"host{n}"), report={"pid": 1, "version": "1"}) for n in range(hosts)]
        shape = {"world_size": hosts, "local_rank": 0, "local_size": 1}
        slots = [Slot(rank=n, cross_rank=n, host=f"host{n}", **shape) for n in range(hosts)]
        self.job = Job(Config(**knobs), self.nodes, slots, Path("logs"), self.now, 0.0)
        self.job.start([Frame("job") for _ in range(hosts)], self.now, 0.0)
        self.actions: list[Action] = []

    def say(self, host: int, kind: str, **facts: Any) -> None:
        self.job.take(Event(self.nodes[host], Frame(kind, facts), self.now))

    def train(self, step: int) -> None:
        for rank in range(len(self.nodes)):
            if step == 1:
                self.say(rank, "started", rank=rank, pid=10 + rank)
                self.say(rank, "claim", rank=rank, pid=10 + rank, line=1)
            self.say(rank, "beat", steps={str(rank): [step, 0.0]}, memory={}, conditions={}, clock=0.0)

    def later(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.job.turn(self.now)
        self.job.outbox.empty(self.actions.append)

    def sent(self, kind: str) -> list[Frame]:
        return [each.frame for each in self.actions if isinstance(each, SendFrame) and each.frame.kind == kind]

    def said(self) -> list[str]:
        return [each.text for each in self.actions if isinstance(each, SayText)]


def test_each_kind_that_an_agent_may_send_has_its_row() -> None:
    made_here = {"connected", "lost"}
    assert World(1).job.routes.keys() == AGENT.kinds.keys() | made_here


def test_a_failure_ends_the_others_and_names_its_rank() -> None:
    world = World(3)
    world.train(1)
    world.say(1, "exit", rank=1, code=-9, **ENDED)
    world.later()
    (stop,) = world.sent("stop")
    assert (stop["grace"], stop["stacks"]) == (1.0, True)
    assert world.sent("death")[0]["text"] == ("rank 1 (pid 11 on host1) was killed by signal 9 (SIGKILL) after 5 steps")
    for rank in (0, 2):
        world.say(rank, "exit", rank=rank, code=-15, **{**ENDED, "time": 2.0, "stopped": True})
    for rank in range(3):
        world.say(rank, "end", stuck=[], signal=0)
    assert world.job.over
    failure = world.job.judge(world.now, [], []).failure
    assert failure is not None and failure.ending.rank == 1 and failure.stopped == [0, 2]


def test_a_rank_that_has_failed_is_the_cause_though_it_handles_sigterm_and_exits_with_0() -> None:
    world = World(2)
    world.train(1)
    facts = {"frames": [], "secondary": False, "thread": "", "around": [], "line": 1}
    world.say(1, "failed", rank=1, pid=11, type="ValueError", message="bad label", step=5, time=1.0, **facts)
    world.say(1, "done", rank=1, pid=11, summary={"steps": 5}, line=1)
    world.later()
    world.later(1.5)
    assert world.sent("stop")
    for rank in range(2):
        world.say(rank, "exit", rank=rank, code=0, **{**ENDED, "time": 2.0, "stopped": True})
        world.say(rank, "end", stuck=[], signal=0)
    failure = world.job.judge(world.now, [], []).failure
    assert failure is not None and (failure.ending.rank, failure.exit_code) == (1, 1)


@pytest.mark.parametrize("who", ["dadt run", "a host"])
def test_what_is_told_to_end_while_it_fails_is_not_started_again(who: str) -> None:
    world = World(2, checkpoint_signal="USR1")
    world.train(1)
    world.say(0, "exit", rank=0, code=-9, **ENDED)
    world.later()
    if who == "dadt run":
        world.job.signal({15}, world.now)
    else:
        world.say(1, "preempted")
    world.say(1, "exit", rank=1, code=-15, **{**ENDED, "stopped": True})
    for rank in range(2):
        world.say(rank, "end", stuck=[], signal=0)
    outcome = world.job.judge(world.now, [], [])
    assert outcome.failure is not None and outcome.told_to_end == (who == "dadt run")


def test_the_others_train_on_where_enough_are_left() -> None:
    world = World(3, min_np=2)
    world.train(1)
    world.say(1, "exit", rank=1, code=-9, **ENDED)
    world.later()
    (regroup,) = world.sent("regroup")
    assert (regroup["generation"], regroup["members"]) == (1, [0, 2])
    assert world.said()[-1].endswith("after 5 steps: training goes on without it")
    assert not world.sent("stop") and not world.job.over


def test_a_rank_for_which_all_others_wait_is_lost_and_killed() -> None:
    world = World(3, min_np=2, timeout=60.0)
    world.train(1)
    for rank in (0, 2):
        world.say(rank, "exchange", rank=rank, line=1, key="key", timeout=300.0)
    world.later(59.0)
    assert not world.sent("regroup")
    world.later(2.0)
    assert world.sent("regroup")[0]["members"] == [0, 2]
    assert [(frame["rank"], frame["number"]) for frame in world.sent("signal")] == [(1, 9)]
    assert world.said()[-1] == "rank 1 (pid 11 on host1) was silent for 60 s: training goes on without it"


def test_a_host_that_is_gone_ends_the_job() -> None:
    world = World(2)
    world.train(1)
    world.say(0, "lost", message="the connection was closed", time=1.0)
    world.later()
    assert len(world.sent("stop")) == 1
    world.later(7.0)
    assert world.job.overdue, "the other agent says nothing more"
    assert world.job.over


def test_ctrl_c_is_gentle_and_the_second_time_it_is_not() -> None:
    world = World(1, grace=5.0)
    world.train(1)
    world.job.signal({2}, world.now)
    world.later(1.0)
    assert [frame["grace"] for frame in world.sent("interrupt")] == [5.0]
    world.job.signal({2}, world.now)
    world.later()
    assert [frame["grace"] for frame in world.sent("stop")] == [0.0]
    assert world.said() == ["stopping the workers after SIGINT (once more: at once)"]


FAILED = {"frames": [], "step": 5, "thread": "", "around": [], "pid": 11}
WAITED = {**FAILED, "type": "CommError", "message": "the connection was closed by a peer", "secondary": True}


def test_a_lost_host_is_the_cause_though_others_have_noticed_it_first() -> None:
    world = World(2)
    world.train(1)
    world.say(1, "beat", steps={}, memory={}, conditions={}, clock=0.0)
    world.say(1, "failed", rank=1, time=0.9, **WAITED)
    world.say(0, "lost", message="the connection was closed", time=1.0)
    world.say(1, "exit", rank=1, code=1, **ENDED)
    world.say(1, "end", stuck=[], signal=0)
    with pytest.raises(LaunchError, match="host0: the connection was closed; all its workers were stopped"):
        world.job.judge(world.now, [], [])


def test_an_agent_that_was_told_to_end_is_the_cause_though_ranks_have_waited_for_its_own() -> None:
    world = World(2)
    late = {**FAILED, "type": "StartTimeout", "message": "rank 0 cannot arrive any more", "secondary": False}
    world.say(0, "exit", rank=0, code=-15, **{**ENDED, "stopped": True})
    world.say(1, "failed", rank=1, time=0.9, **late)
    world.say(1, "exit", rank=1, code=1, **ENDED)
    world.say(0, "end", stuck=[], signal=15)
    world.say(1, "end", stuck=[], signal=0)
    with pytest.raises(LaunchError, match=r"the agent of this host .* was told to end by signal 15"):
        world.job.judge(world.now, [], [])


def test_a_rank_that_has_waited_is_not_blamed_for_one_of_which_nobody_knows() -> None:
    world = World(2)
    world.train(1)
    world.say(1, "failed", rank=1, time=0.9, **WAITED)
    world.say(1, "exit", rank=1, code=1, **ENDED)
    world.say(1, "end", stuck=[], signal=0)
    world.later(1.5)
    world.later(10.0)
    assert world.job.overdue
    with pytest.raises(LaunchError, match="host0: it is not known how rank 0 has ended: its agent has not told"):
        world.job.judge(world.now, [], [])


def test_ranks_that_wait_in_vain_for_a_connection_at_the_start_learn_who_is_stopped() -> None:
    world = World(3, min_np=1)
    for rank in range(3):
        world.say(rank, "claim", rank=rank, pid=10 + rank, line=1)
    world.say(1, "beat", steps={"1": [-1, 3.0]}, memory={}, conditions={"1": "stopped"}, clock=0.0)
    for rank in (0, 2):
        told = {"generation": 0, "timeout": 25.0 + rank, "text": "timed out", "line": 2, "pid": 10 + rank}
        world.say(rank, "reconnect", rank=rank, **told)
    world.later(25.5)
    world.say(0, "failed", rank=0, time=1.0, **{**WAITED, "pid": 10})
    world.say(0, "exit", rank=0, code=1, **ENDED)
    world.later()
    answers = [frame["answer"] for frame in world.sent("answer")]
    assert len(answers) == 2, "the job ends for all once it does so for one"
    assert all(not each["anew"] and re.match(r"rank 1 \(on host1, is stopped", each["text"]) for each in answers)


def test_ranks_that_all_wait_are_not_lost_as_the_first_of_them_says_so() -> None:
    world = World(4, min_np=1, on_stall="abort", stall_warning=5.0)
    world.train(1)
    world.later(0.5)
    for rank, wait in enumerate((5.5, 0.2, 0.2)):  # after steps of some seconds, for a rank that does not come
        world.later(wait)
        world.say(rank, "peers", rank=rank, pid=10 + rank, line=2, timeout=0.0)
        world.later()
    assert not world.sent("regroup")
    for rank in (0, 1, 2):
        world.say(rank, "peers", rank=rank, pid=10 + rank, line=3, timeout=0.0)
    world.later(4.0)
    assert [frame["members"] for frame in world.sent("regroup")] == [[0, 1, 2]]


def test_a_later_reason_to_end_only_hastens_the_end() -> None:
    world = World(2, grace=0.0)
    world.train(1)
    world.say(1, "exit", rank=1, code=-9, **ENDED)
    world.later()
    world.later(5.0)
    world.job.signal({15}, world.now)
    world.later(1.5)
    assert world.job.overdue


def test_a_new_worker_that_comes_as_all_have_ended_does_not_join() -> None:
    world = World(2, min_np=1, algorithm="gossip")
    world.train(1)
    world.say(1, "exit", rank=1, code=-9, **ENDED)
    world.later()
    world.later(1.5)
    assert [frame["rank"] for frame in world.sent("worker")] == [1]
    world.say(0, "ending", rank=0, pid=10, steps=5, line=1)
    world.say(0, "exit", rank=0, code=0, **ENDED)
    world.later()
    world.say(1, "claim", rank=1, pid=12, line=3)
    world.say(1, "reconnect", rank=1, pid=12, line=4, generation=1, timeout=30.0, text="rank 0 has exited")
    world.later(3.0)
    assert [(frame["rank"], frame["number"]) for frame in world.sent("signal")] == [(1, 9)]
    assert len(world.sent("regroup")) == 1


def test_a_cut_that_leaves_too_few_is_what_all_that_wait_hear_of() -> None:
    world = World(3, min_np=3, timeout=10.0)
    world.train(1)
    world.later(0.5)
    world.say(1, "silent", peer=2, seconds=5.0)
    for rank in range(3):
        told = {"generation": 0, "timeout": 20.0, "text": "closed", "line": 2, "pid": 10 + rank}
        world.say(rank, "reconnect", rank=rank, **told)
    world.later(12.0)
    answers = [frame["answer"] for frame in world.sent("answer")]
    assert len(answers) == 3 and not any("goes on" in text for text in world.said())
    cut = re.compile("host2: host1 has heard nothing from host2 .* too few are left without it")
    assert all(cut.match(each["text"]) for each in answers)


def test_of_two_lost_hosts_the_first_one_is_named_whichever_is_reported_first() -> None:
    world = World(3)
    world.train(1)
    world.say(2, "lost", message="the connection was closed", time=20.0)
    world.say(1, "lost", message="it has no power", time=10.0)
    world.later()
    with pytest.raises(LaunchError, match=r"host1: it has no power"):
        world.job.judge(world.now, [], [])


def test_where_nobody_waits_a_rank_that_has_just_connected_is_not_silent() -> None:
    world = World(3, min_np=1, algorithm="gossip", timeout=15.0)
    world.train(1)
    world.later(13.0)
    for rank in range(3):
        told = {"generation": 0, "timeout": 25.0, "text": "closed", "line": 2, "pid": 10 + rank}
        world.say(rank, "reconnect", rank=rank, **told)
    for rank in (0, 1):
        world.say(rank, "ending", rank=rank, pid=10 + rank, steps=5, line=3)
    world.later(3.0)
    assert not any("silent" in text for text in world.said())
    world.later(13.0)
    assert world.said()[-1] == "rank 2 (pid 12 on host2) was silent for 15 s: training goes on without it"


def test_a_rank_that_has_left_at_its_own_end_is_lost_as_the_others_connect_anew() -> None:
    world = World(4, min_np=1)
    world.train(1)
    world.say(1, "ending", rank=1, pid=11, steps=1)
    world.say(2, "exit", rank=2, code=-9, **ENDED)
    world.later()
    assert world.sent("regroup")[-1]["members"] == [0, 1, 3]
    for rank in (0, 3):
        world.say(rank, "exchange", rank=rank, line=1, key="connect", generation=1, timeout=60.0)
    world.say(1, "exit", rank=1, code=0, **ENDED)
    for rank in (0, 3):
        world.say(rank, "reconnect", rank=rank, line=2, text="cannot arrive", generation=1, timeout=60.0)
    world.later()
    assert world.sent("regroup")[-1]["members"] == [0, 3]
    assert "rank 1 (pid 11 on host1) has exited with code 0" in world.said()[-1]
    assert not world.sent("stop")


def test_a_rank_that_has_left_at_its_own_end_is_not_lost_while_nobody_needs_it() -> None:
    world = World(2, min_np=1)
    world.train(1)
    world.say(1, "ending", rank=1, pid=11, steps=1)
    world.say(1, "exit", rank=1, code=0, **ENDED)
    world.later(10.0)
    assert not world.sent("regroup")


def test_a_rank_whose_connection_fails_later_hears_for_whom_all_have_waited() -> None:
    world = World(3, min_np=3, timeout=20.0)
    world.train(1)
    for _ in range(6):
        world.later(4.0)
        for rank in (0, 2):
            world.say(rank, "peers", rank=rank, line=1)
    world.say(0, "reconnect", rank=0, line=2, text="closed by a peer", generation=0, timeout=60.0)
    world.later()
    answer = world.sent("answer")[-1]["answer"]
    assert (answer["kind"], answer["anew"]) == ("reconnect", False)
    assert answer["text"] == "rank 1 (pid 11 on host1) was silent for 20 s, and too few are left without it"


def test_a_rank_that_could_not_connect_hears_who_was_stopped_then_though_it_goes_on_again() -> None:
    world = World(2, min_np=1)
    world.say(1, "beat", steps={"1": [-1, 3.0]}, memory={}, conditions={"1": "stopped"}, clock=0.0)
    world.say(0, "reconnect", rank=0, line=2, text="connectFullMesh failed: timed out", generation=0, timeout=20.0)
    world.say(1, "beat", steps={"1": [-1, 6.0]}, memory={}, conditions={}, clock=3.0)
    world.later(21.0)
    answer = world.sent("answer")[-1]["answer"]
    assert not answer["anew"]
    assert answer["text"].startswith("rank 1 (on host1, is stopped (SIGSTOP")
    assert answer["text"].endswith("did not connect")


def test_a_stopped_rank_is_not_the_cause_where_a_host_was_told_to_end_before() -> None:
    world = World(3)
    world.train(1)
    world.say(0, "beat", steps={"0": [1, 3.0]}, memory={}, conditions={"0": "stopped"}, clock=0.0)
    world.say(2, "exit", rank=2, code=-9, **{**ENDED, "stopped": True})
    world.say(2, "end", stuck=[], signal=15)
    world.say(1, "failed", rank=1, line=1, time=2.0, **WAITED)
    world.say(1, "exit", rank=1, code=1, **{**ENDED, "time": 2.1})
    world.say(0, "exit", rank=0, code=-9, **{**ENDED, "time": 3.0, "stopped": True})
    for rank in (0, 1):
        world.say(rank, "end", stuck=[], signal=0)
    with pytest.raises(LaunchError, match=r"host2: the agent of this host .* was told to end by signal 15"):
        world.job.judge(world.now, [], [])


def test_a_host_that_is_about_to_join_is_not_silent_for_the_one_before_it() -> None:
    world = World(3, min_np=1, algorithm="gossip")
    world.train(1)
    for host in range(3):
        world.say(host, "heartbeat", port=4000 + host)
    world.say(0, "silent", peer=1, seconds=5.0)
    world.nodes[1] = Node(1, Host(name="host9"), heard=world.now + 3.0)
    for node in (world.nodes[0], world.nodes[2]):
        node.heard = world.now + 3.0
    world.later(3.0)
    assert not world.said()
