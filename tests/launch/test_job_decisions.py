"""What the launcher decides, without any process: events and times go in, actions come out."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from harness.decided_job import ENDED, FAILED, WAITED, DecidedJob

from dadt.control.schema import AGENT
from dadt.launch.actions import SendFrame
from dadt.launch.ending.processes import NATURAL_SECONDS
from dadt.launch.hosts.host import Host
from dadt.launch.members.node import Node


def test_each_kind_that_an_agent_may_send_has_its_row() -> None:
    made_here = {"connected", "lost"}
    assert DecidedJob(1).job.routes.keys() == AGENT.kinds.keys() | made_here


def test_a_failure_ends_the_others_and_names_its_rank() -> None:
    world = DecidedJob(3)
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


@pytest.mark.parametrize("who", ["dadt run", "a host"])
def test_what_is_told_to_end_while_it_fails_is_not_started_again(who: str) -> None:
    world = DecidedJob(2, checkpoint_signal="USR1")
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


def test_checkpoint_signals_are_counted_for_all_hosts() -> None:
    world = DecidedJob(2, checkpoint_signal="USR1")
    for number in (10, 12, 10):
        world.job.signal({number}, world.now)
        world.later()
    assert [(frame["number"], frame.get("saves")) for frame in world.sent("signal")] == [(10, 1), (12, None), (10, 2)]
    assert world.job.saves == 2, "what a host is told that joins now"


def test_the_others_train_on_where_enough_are_left() -> None:
    world = DecidedJob(3, min_np=2)
    world.train(1)
    world.say(1, "exit", rank=1, code=-9, **ENDED)
    world.later()
    (regroup,) = world.sent("regroup")
    assert (regroup["generation"], regroup["members"]) == (1, [0, 2])
    assert world.said()[-1].endswith("after 5 steps: training goes on without it")
    assert not world.sent("stop") and not world.job.over


def test_a_rank_takes_its_island_with_it() -> None:
    """--min-np counts islands."""
    world = DecidedJob(6, island_size=2, island="2", min_np=2)
    world.train(1)
    words = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:2"
    facts = {**FAILED, "secondary": False, "around": [], "time": 1.0, "line": 1}
    world.say(2, "failed", rank=2, type="RuntimeError", message=words, **facts)  # before it is known why
    world.later()
    assert not world.sent("regroup")
    world.say(3, "exit", rank=3, code=-9, **ENDED)
    world.later()
    assert world.sent("regroup")[0]["members"] == [0, 1, 4, 5]
    assert [(frame["rank"], frame["number"]) for frame in world.sent("signal")] == [(2, 9)]
    name = "rank 3 (pid 13 on host3) was killed by signal 9 (SIGKILL) after 5 steps"
    assert world.said()[-1] == f"{name}: training goes on without the island of ranks 2 and 3"
    world.say(2, "exit", rank=2, code=1, **ENDED)
    world.later()
    assert not world.sent("stop")
    world.say(5, "exit", rank=5, code=-9, **ENDED)
    world.later()
    assert world.sent("stop") and len(world.sent("regroup")) == 1


@pytest.mark.parametrize(("code", "seconds", "named"), [(0, -0.1, 3), (0, 0.5, 3), (-9, 0.5, 3), (-9, 2.0, 2)])
def test_a_rank_that_fails_as_another_of_its_island_has_ended_is_not_the_one_that_is_named(
    code: int, seconds: float, named: int
) -> None:
    """seconds: from the exit of the rank that fails until that of the other one is known; longer than it is waited for
    in the last case."""
    world = DecidedJob(4, island_size=2, island="2", min_np=1)
    world.train(1)
    facts = {**FAILED, "secondary": False, "around": [], "time": 1.0, "line": 1, "type": "RuntimeError"}
    if seconds < 0:
        world.say(3, "exit", rank=3, code=code, **ENDED)
    world.say(2, "failed", rank=2, message="[gloo/transport/tcp/pair.cc:534] Connection closed by peer", **facts)
    world.say(2, "exit", rank=2, code=1, **ENDED)
    world.later(max(0.0, seconds))
    if seconds > 0:
        world.say(3, "exit", rank=3, code=code, **ENDED)
    world.later(0.5)
    assert world.sent("regroup")[0]["members"] == [0, 1]
    assert [text.split()[1] for text in world.said()] == [str(named)]
    assert world.said()[0].endswith(": training goes on without the island of ranks 2 and 3")


def test_islands_with_stopped_ranks_are_not_waited_for_without_end() -> None:
    """The other ranks of these islands wait within the script's own process group, of which nobody is told."""
    world = DecidedJob(4, island_size=2, island="2", min_np=1, timeout=60.0)
    world.train(1)
    world.say(0, "exit", rank=0, code=-9, **ENDED)
    world.say(1, "exit", rank=1, code=-9, **ENDED)
    stopped = {"memory": {}, "clock": 0.0, "steps": {"2": [1, 0.0]}, "conditions": {"2": "stopped"}}
    for _ in range(7):
        world.later(10.0, heard=range(4))
        world.say(2, "beat", **stopped)
        world.say(3, "beat", **{**stopped, "steps": {"3": [1, 0.0]}, "conditions": {}})
    world.later(10.0, heard=range(4))
    world.later()
    assert world.sent("stop"), world.said()
    for rank in (2, 3):
        world.say(rank, "exit", rank=rank, code=-9, **{**ENDED, "stopped": True})
    for rank in range(4):
        world.say(rank, "end", stuck=[], signal=0)
    failure = world.job.judge(world.now, [], []).failure
    assert failure is not None and failure.ending.rank == 2


@pytest.mark.parametrize("condition", ["stopped", ""])
def test_an_island_is_not_lost_as_one_of_its_ranks_waits_for_another_island(condition: str) -> None:
    """Ranks 1 and 3 have exchanged, and wait in their own process groups for rank 0, which waits for rank 2."""
    world = DecidedJob(4, island_size=2, island="2", min_np=1, timeout=60.0)
    world.train(1)
    for rank, step in enumerate((5, 6, 5, 6)):
        conditions = {"2": condition} if rank == 2 and condition else {}
        world.say(rank, "beat", steps={str(rank): [step, 0.0]}, memory={}, conditions=conditions, clock=0.0)
    world.say(0, "exchange", rank=0, line=1, key="key", timeout=300.0)
    world.later(59.0, heard=range(4))
    assert not world.sent("regroup")
    world.later(2.0, heard=range(4))
    assert world.sent("regroup")[0]["members"] == [0, 1], world.said()
    assert {(frame["rank"], frame["number"]) for frame in world.sent("signal")} == {(2, 9), (3, 9)}
    assert "rank 3 (pid 13 on host3) were silent for 60 s" in world.said()[-1]
    assert not world.sent("stop")


@pytest.mark.parametrize("asking", [(3, 4), (2, 4)])
def test_islands_that_wait_for_each_other_after_a_loss_go_on_without_one(asking: Sequence[int]) -> None:
    """Ranks 3 and 4 have not completed a step that ranks 5 and 2 have, which wait for them within their islands. Ranks
    2 and 4 wait for each other alone, and may connect the next time."""
    crossed = asking == (3, 4)
    world = DecidedJob(6, island_size=2, island="2", min_np=1)
    world.train(1)
    world.say(0, "exit", rank=0, code=-9, **ENDED)
    world.say(1, "exit", rank=1, code=-9, **ENDED)
    for rank in range(2, 6):
        step = 5 if rank in asking else 6
        world.say(rank, "beat", steps={str(rank): [step, 0.0]}, memory={}, conditions={}, clock=0.0)
    for trial in range(2):
        world.later(1.0)
        for rank in asking:
            facts = {"rank": rank, "text": "it did not arrive", "timeout": 300.0, "generation": trial + 1, "line": 1}
            world.say(rank, "reconnect", **facts)
        world.later(3.0, heard=range(6))
    left = [[2, 3, 4, 5], [2, 3, 4, 5], [2, 3] if crossed else [2, 3, 4, 5]]
    assert [frame["members"] for frame in world.sent("regroup")] == left
    told = ": islands wait for each other: training goes on without the island of ranks 4 and 5"
    assert world.said()[-1].endswith(told) is crossed


def test_the_rest_of_an_island_saves_where_one_of_its_hosts_is_told_to_end() -> None:
    world = DecidedJob(4, island_size=2, island="2", min_np=1, checkpoint_signal="USR1")
    world.train(1)
    world.say(2, "preempted")
    world.later()
    orders = [
        (each.node, each.frame.header)
        for each in world.actions
        if isinstance(each, SendFrame) and each.frame.kind == "signal"
    ]
    assert orders == [(world.nodes[3], {"number": 10, "saves": 0, "ranks": [3]})]
    world.say(3, "preempted")
    world.later()
    assert len(world.sent("signal")) == 1  # of host 2 all are leaving already
    world.say(3, "exit", rank=3, code=0, **ENDED)  # it has saved
    world.later()
    assert world.sent("regroup")[0]["members"] == [0, 1]
    assert "rank 3 (pid 13 on host3) has left, as its host was told to end" in world.said()[-1]


@pytest.mark.parametrize("code", [0, 1])
def test_a_rank_of_another_host_of_the_island_leaves_or_fails(code: int) -> None:
    world = DecidedJob(4, island_size=2, island="2", min_np=1, checkpoint_signal="USR1")
    world.train(1)
    world.say(2, "preempted")
    world.say(3, "exit", rank=3, code=code, **ENDED)
    world.later()
    left = "has exited with code 1 after 5 steps" if code else "has left, as a host of its island was told to end"
    assert f"rank 3 (pid 13 on host3) {left}: training goes on without" in world.said()[-1]


def test_a_rank_for_which_all_others_wait_is_lost_and_killed() -> None:
    world = DecidedJob(3, min_np=2, timeout=60.0)
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
    world = DecidedJob(2)
    world.train(1)
    world.say(0, "lost", message="the connection was closed", time=1.0)
    world.later()
    assert len(world.sent("stop")) == 1
    world.later(7.0)
    assert world.job.overdue, "the other agent says nothing more"
    assert world.job.over


def test_ctrl_c_is_gentle_and_the_second_time_it_is_not() -> None:
    world = DecidedJob(1, grace=5.0)
    world.train(1)
    world.job.signal({2}, world.now)
    world.later(1.0)
    assert [frame["grace"] for frame in world.sent("interrupt")] == [5.0]
    world.job.signal({2}, world.now)
    world.later()
    assert [frame["grace"] for frame in world.sent("stop")] == [0.0]
    assert world.said() == ["stopping the workers after SIGINT (once more: at once)"]


def test_what_holds_a_rank_is_forgotten_once_its_host_does_not_answer() -> None:
    world = DecidedJob(2)
    world.train(1)
    world.say(1, "beat", steps={"1": [1, 3.0]}, memory={}, conditions={"1": "stopped"}, clock=0.0)
    held = "is stopped (SIGSTOP, pid 11 on host1; kill -CONT 11 lets it go on), at step 1"
    for heard, state in [(range(2), held), ((0,), "at step 1")]:
        world.later(4.0, heard=heard)
        world.say(0, "peers", rank=0, pid=10, line=2, timeout=0.0)
        world.later()
        assert world.sent("answer")[-1]["answer"]["peers"][1]["state"] == state


def test_a_job_ends_well_though_a_lost_rank_cannot_be_ended() -> None:
    world = DecidedJob(3, min_np=2, timeout=10.0)
    world.train(1)
    for _ in range(8):
        world.say(0, "beat", steps={"0": [1, 9.0]}, memory={}, conditions={"0": "stopped"}, clock=0.0)
        for rank in (1, 2):
            world.say(rank, "peers", rank=rank, pid=10 + rank, line=2, timeout=0.0)
        world.later(2.0, heard=range(3))
    assert [frame["members"] for frame in world.sent("regroup")] == [[1, 2]]
    for rank in (1, 2):
        world.say(rank, "exit", rank=rank, code=0, **ENDED)
        world.say(rank, "end", stuck=[], signal=0)
    world.later()
    assert world.sent("stop")[-1].header == {"natural": NATURAL_SECONDS}
    world.later(15.0)
    assert len(world.sent("stop")) == 1, "no failure has ended it"
    world.say(0, "end", stuck=[10], signal=0)
    assert world.job.over and world.job.judge(world.now, [], []).failure is None


def test_ranks_that_wait_in_vain_for_a_connection_at_the_start_learn_who_is_stopped() -> None:
    world = DecidedJob(3, min_np=1)
    for rank in range(3):
        world.say(rank, "claim", rank=rank, pid=10 + rank, line=1)
    world.say(1, "beat", steps={"1": [-1, 3.0]}, memory={}, conditions={"1": "stopped"}, clock=0.0)
    for rank in (0, 2):
        told = {"generation": 0, "timeout": 25.0 + rank, "text": "timed out", "line": 2, "pid": 10 + rank}
        world.say(rank, "reconnect", rank=rank, **told)
    world.later(25.5, heard=range(3))
    world.say(0, "failed", rank=0, time=1.0, **{**WAITED, "pid": 10})
    world.say(0, "exit", rank=0, code=1, **ENDED)
    world.later()
    answers = [frame["answer"] for frame in world.sent("answer")]
    assert len(answers) == 2, "the job ends for all once it does so for one"
    assert all(not each["anew"] and re.match(r"rank 1 \(on host1, is stopped", each["text"]) for each in answers)


def test_ranks_that_all_wait_are_not_lost_as_the_first_of_them_says_so() -> None:
    world = DecidedJob(4, min_np=1, on_stall="abort", stall_warning=5.0)
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
    world = DecidedJob(2, grace=0.0)
    world.train(1)
    world.say(1, "exit", rank=1, code=-9, **ENDED)
    world.later()
    world.later(5.0)
    world.job.signal({15}, world.now)
    world.later(1.5)
    assert world.job.overdue


def test_a_new_worker_that_comes_as_all_have_ended_does_not_join() -> None:
    world = DecidedJob(2, min_np=1, algorithm="gossip")
    world.train(1)
    world.say(1, "exit", rank=1, code=-9, **ENDED)
    world.later()
    world.later(1.5)
    assert [frame["rank"] for frame in world.sent("worker")] == [1]
    world.say(0, "ending", rank=0, pid=10, steps=5, gathered=0, line=1)
    world.say(0, "exit", rank=0, code=0, **ENDED)
    world.later()
    world.say(1, "claim", rank=1, pid=12, line=3)
    world.say(1, "reconnect", rank=1, pid=12, line=4, generation=1, timeout=30.0, text="rank 0 has exited")
    world.later(3.0)
    assert [(frame["rank"], frame["number"]) for frame in world.sent("signal")] == [(1, 9)]
    assert len(world.sent("regroup")) == 1


def test_with_gossip_new_workers_of_an_island_join_once_all_have_come() -> None:
    world = DecidedJob(4, island_size=2, island="2", min_np=1, algorithm="gossip")
    world.train(1)
    for attempt in (1, 2):
        for rank in (3, 2):
            world.say(rank, "exit", rank=rank, code=-9, **ENDED)
        world.later()
        world.later(3.0)
        assert [frame["rank"] for frame in world.sent("worker")] == [2, 3] * attempt
        world.say(2, "claim", rank=2, pid=22, line=3)
        world.later()
        assert len(world.sent("regroup")) == 1
    world.say(3, "claim", rank=3, pid=23, line=3)
    world.later()
    assert [frame["members"] for frame in world.sent("regroup")] == [[0, 1], [0, 1, 2, 3]]
    for rank in (0, 1, 3):
        world.say(rank, "ending", rank=rank, pid=10 + rank, steps=5, gathered=0, line=1)
    world.later()
    assert world.sent("regroup")[-1]["members"] == [0, 1], "ranks of an island leave together"


@pytest.mark.parametrize("islands", [2, 3])
def test_with_gossip_a_new_island_leaves_with_one_that_is_lost_before_it_steps(islands: int) -> None:
    """One of its ranks may not have the part of the model that its equal was to give."""
    size = 2 * islands
    world = DecidedJob(size, island_size=2, island="2", min_np=1, algorithm="gossip")
    world.train(1)
    for rank in (size - 1, size - 2):
        world.say(rank, "exit", rank=rank, code=-9, **ENDED)
    world.later()
    world.later(3.0)
    for rank in (size - 1, size - 2):
        world.say(rank, "claim", rank=rank, pid=20 + rank, line=3)
    world.later()
    assert world.sent("regroup")[-1]["members"] == list(range(size))
    world.say(0, "exit", rank=0, code=-9, **ENDED)
    world.later()
    if islands == 2:
        assert len(world.sent("regroup")) == 2, "nobody is left to train on"
    else:
        assert world.sent("regroup")[-1]["members"] == [2, 3]
        assert world.said()[-1].endswith(": training goes on without the islands of ranks 0, 1, 4 and 5")


def test_a_cut_that_leaves_too_few_is_what_all_that_wait_hear_of() -> None:
    world = DecidedJob(3, min_np=3, timeout=10.0)
    world.train(1)
    world.later(0.5)
    world.say(1, "silent", peer=2, port=4002, seconds=5.0)
    for rank in range(3):
        told = {"generation": 0, "timeout": 20.0, "text": "closed", "line": 2, "pid": 10 + rank}
        world.say(rank, "reconnect", rank=rank, **told)
    world.later(12.0)
    answers = [frame["answer"] for frame in world.sent("answer")]
    assert len(answers) == 3 and not any("goes on" in text for text in world.said())
    cut = re.compile("host2: host1 has heard nothing from host2 .* too few are left without it")
    assert all(cut.match(each["text"]) for each in answers)


def test_where_nobody_waits_a_rank_that_has_just_connected_is_not_silent() -> None:
    world = DecidedJob(3, min_np=1, algorithm="gossip", timeout=15.0)
    world.train(1)
    world.later(13.0)
    for rank in range(3):
        told = {"generation": 0, "timeout": 25.0, "text": "closed", "line": 2, "pid": 10 + rank}
        world.say(rank, "reconnect", rank=rank, **told)
    for rank in (0, 1):
        world.say(rank, "ending", rank=rank, pid=10 + rank, steps=5, gathered=0, line=3)
    world.later(3.0)
    assert not any("silent" in text for text in world.said())
    world.later(13.0)
    assert world.said()[-1] == "rank 2 (pid 12 on host2) was silent for 15 s: training goes on without it"


def test_a_rank_that_has_left_at_its_own_end_is_lost_as_the_others_connect_anew() -> None:
    world = DecidedJob(4, min_np=1)
    world.train(1)
    world.say(1, "ending", rank=1, pid=11, steps=1, gathered=0)
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


def test_where_nobody_waits_others_connect_without_a_rank_that_has_finished_which_is_not_lost() -> None:
    world = DecidedJob(4, min_np=2, algorithm="gossip")
    world.train(1)
    world.say(1, "ending", rank=1, pid=11, steps=1, gathered=0)
    world.say(1, "exit", rank=1, code=0, **ENDED)
    world.later(1.0, heard=range(4))
    assert not world.sent("regroup")
    world.say(2, "lost", message="the connection was closed", time=1.0)
    for rank in (0, 3):
        world.say(rank, "reconnect", rank=rank, line=2, text="cannot arrive", generation=1, timeout=60.0)
    world.later()
    assert [frame["members"] for frame in world.sent("regroup")] == [[0, 1, 3], [0, 3]]
    assert world.said()[-1] == "rank 1 finished before the others, which train on"
    assert [loss.rank for loss in world.job.watch.losses] == [2]
    world.say(3, "ending", rank=3, pid=13, steps=1, gathered=0)
    world.say(0, "exit", rank=0, code=-9, **ENDED)
    world.later()
    assert not world.sent("stop")


@pytest.mark.parametrize("algorithm", ["pipe", "gossip"])
def test_a_rank_that_has_left_at_its_own_end_is_not_lost_while_nobody_needs_it(algorithm: str) -> None:
    world = DecidedJob(2, min_np=1, algorithm=algorithm)
    world.train(1)
    world.say(1, "ending", rank=1, pid=11, steps=1, gathered=0)
    world.say(1, "exit", rank=1, code=0, **ENDED)
    world.later(10.0)
    assert not world.sent("regroup")


def test_a_rank_whose_connection_fails_later_hears_for_whom_all_have_waited() -> None:
    world = DecidedJob(3, min_np=3, timeout=20.0)
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


def test_ranks_that_meet_in_vain_hear_that_a_rank_is_lost_and_wait_no_longer() -> None:
    world = DecidedJob(3, min_np=3, timeout=60.0, stall_warning=5.0, on_stall="abort")
    world.train(1)
    for rank in (0, 2):
        world.say(rank, "exchange", rank=rank, line=1, key="connect", generation=0, timeout=60.0)
    for _ in range(10):
        world.later(1.0)
    told = [frame["answer"] for frame in world.sent("answer")]
    assert [answer["type"] for answer in told] == ["PeerLost", "PeerLost"]
    assert told[0]["message"] == "rank 1 (pid 11 on host1) was silent for 5 s, and too few are left without it"


@pytest.mark.parametrize("ends", [False, True])
def test_a_rank_that_could_not_connect_hears_who_was_stopped_then_though_it_goes_on_again(ends: bool) -> None:
    """ends: whether the job ends before, as a third rank has failed for that."""
    world = DecidedJob(3 if ends else 2, min_np=1)
    world.say(1, "beat", steps={"1": [-1, 3.0]}, memory={}, conditions={"1": "stopped"}, clock=0.0)
    world.say(0, "reconnect", rank=0, line=2, text="connectFullMesh failed: timed out", generation=0, timeout=20.0)
    world.say(1, "beat", steps={"1": [-1, 6.0]}, memory={}, conditions={}, clock=3.0)
    if ends:
        world.say(2, "failed", rank=2, time=1.0, **WAITED)
    world.later(0.5 if ends else 21.0)
    answer = world.sent("answer")[-1]["answer"]
    assert not answer["anew"]
    assert answer["text"].startswith("rank 1 (on host1, is stopped (SIGSTOP")
    assert answer["text"].endswith("did not connect")


def test_a_host_that_is_about_to_join_is_not_silent_for_the_one_before_it() -> None:
    world = DecidedJob(3, min_np=1, algorithm="gossip")
    world.train(1)
    for host in range(3):
        world.say(host, "heartbeat", port=4000 + host)
    world.say(0, "silent", peer=1, port=4001, seconds=5.0)
    world.nodes[1] = Node(1, Host(name="host9"), heard=world.now + 3.0)
    for node in (world.nodes[0], world.nodes[2]):
        node.heard = world.now + 3.0
    world.later(3.0)
    assert not world.said()


def test_a_host_that_has_joined_is_not_silent_for_the_one_before_it() -> None:
    """What another host has said of that one may arrive after the new one has come."""
    world = DecidedJob(3, min_np=1, algorithm="gossip", timeout=15.0)
    world.train(1)
    for host in range(3):
        world.say(host, "heartbeat", port=4000 + host)
    world.nodes[1] = Node(1, Host(name="host9"))
    world.say(1, "heartbeat", port=4009)
    world.say(0, "silent", peer=1, port=4001, seconds=10.0)
    world.later(3.0, heard=range(3))
    assert not world.said()
    world.say(0, "silent", peer=1, port=4009, seconds=5.0)
    world.say(0, "heard", peer=1, port=4001, seconds=0.0)
    world.later(3.0, heard=range(3))
    assert world.said()[0].startswith("host0 has heard nothing from host9")


@pytest.mark.parametrize(("unheard", "cut"), [([(3, 4)], 4), ([(0, 4), (1, 4), (2, 4), (3, 4)], 4), ([], None)])
def test_a_host_that_others_have_never_heard_is_given_up_where_all_connect_in_vain(
    unheard: list[tuple[int, int]], cut: int | None
) -> None:
    """Not where a host hears few others at all, as it may be that a firewall lets no heartbeats through."""
    world = DecidedJob(5, min_np=4, timeout=10.0)
    for host in range(5):
        world.say(host, "started", rank=host, pid=10 + host)
        world.say(host, "claim", rank=host, pid=10 + host, line=1)
        world.say(host, "heartbeat", port=4000 + host)
    every = [(one, other) for one in range(5) for other in range(5) if one != other]
    for host, peer in unheard or every:
        world.say(host, "unheard", peer=peer, port=4000 + peer, seconds=2.0)
    told = {"timeout": 20.0, "text": "connectFullMesh failed: timed out", "line": 2}
    for rank in range(5):
        world.say(rank, "reconnect", rank=rank, generation=0, **told)
    world.later(2.0, heard=range(5))
    assert world.sent("regroup")[-1]["members"] == [0, 1, 2, 3, 4]
    for _ in range(6):
        for rank in range(5):
            world.say(rank, "peers", rank=rank, line=3)
        world.later(3.0, heard=range(5))
    assert world.sent("regroup")[-1]["members"] == [rank for rank in range(5) if rank != cut]
    assert any("host4: host" in text and "has heard nothing from host4" in text for text in world.said()) == bool(cut)
