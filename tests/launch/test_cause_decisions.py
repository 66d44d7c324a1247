"""Whom the launcher blames for the end of a job, from what it was told of ranks and hosts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from harness.decided_job import ENDED, FAILED, WAITED, DecidedJob

from dadt.errors import LaunchError


def test_a_rank_that_has_failed_is_the_cause_though_it_handles_sigterm_and_exits_with_0() -> None:
    world = DecidedJob(2)
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


def test_a_lost_host_is_the_cause_though_others_have_noticed_it_first() -> None:
    world = DecidedJob(2)
    world.train(1)
    world.say(1, "beat", steps={}, memory={}, conditions={}, clock=0.0)
    world.say(1, "failed", rank=1, time=0.9, **WAITED)
    world.say(0, "lost", message="the connection was closed", time=1.0)
    world.say(1, "exit", rank=1, code=1, **ENDED)
    world.say(1, "end", stuck=[], signal=0)
    with pytest.raises(LaunchError, match="host0: the connection was closed; all its workers were stopped"):
        world.job.judge(world.now, [], [])


@pytest.mark.parametrize(("seconds", "named"), [(0.1, "host2: the connection"), (20.0, "the way between host0 and")])
def test_a_lost_host_is_the_cause_though_others_have_not_heard_each_other_for_a_while(
    seconds: float, named: str
) -> None:
    """seconds: from when a rank has waited in vain until the host is lost."""
    world = DecidedJob(3)
    world.train(1)
    for rank in range(3):
        world.say(rank, "beat", steps={}, memory={}, conditions={}, clock=0.0)
    world.later(0.1, heard=range(3))
    world.say(0, "silent", peer=1, port=4001, seconds=4.0)
    world.say(1, "silent", peer=0, port=4000, seconds=4.0)
    world.say(1, "failed", rank=1, time=5.0, **WAITED)
    world.say(2, "lost", message="the connection was closed", time=5.0 + seconds)
    for rank in range(2):
        world.say(rank, "exit", rank=rank, code=1, **{**ENDED, "stopped": rank == 0})
        world.say(rank, "end", stuck=[], signal=0)
    try:
        failure = world.job.judge(world.now, [], []).failure
        told = failure.lines()[0] if failure is not None else ""
    except LaunchError as error:
        told = str(error)
    assert told.startswith(named)


def test_who_was_given_up_as_silent_is_named_though_it_has_waited_then_for_those_that_gave_it_up() -> None:
    world = DecidedJob(2)
    world.train(1)
    late = {**FAILED, "type": "StartTimeout", "message": "rank 0 cannot arrive any more", "secondary": False}
    world.say(0, "failed", rank=0, time=1.0, **{**WAITED, "type": "PeerLost", "message": "rank 1 was silent for 10 s"})
    world.say(0, "exit", rank=0, code=1, **{**ENDED, "time": 1.1})
    world.say(1, "failed", rank=1, time=3.0, **late)
    world.say(1, "exit", rank=1, code=1, **{**ENDED, "time": 3.1, "stopped": True})
    failure = world.job.judge(world.now, [], []).failure
    assert failure is not None and failure.ending.rank == 0


def test_an_agent_that_was_told_to_end_is_the_cause_though_ranks_have_waited_for_its_own() -> None:
    world = DecidedJob(2)
    late = {**FAILED, "type": "StartTimeout", "message": "rank 0 cannot arrive any more", "secondary": False}
    world.say(0, "exit", rank=0, code=-15, **{**ENDED, "stopped": True})
    world.say(1, "failed", rank=1, time=0.9, **late)
    world.say(1, "exit", rank=1, code=1, **ENDED)
    world.say(0, "end", stuck=[], signal=15)
    world.say(1, "end", stuck=[], signal=0)
    with pytest.raises(LaunchError, match=r"the agent of this host .* was told to end by signal 15"):
        world.job.judge(world.now, [], [])


def test_an_agent_that_was_told_to_end_is_not_the_cause_where_another_one_was_lost() -> None:
    """Slurm ends the agents of all hosts once one of them has failed, and the launcher may hear of that one last."""
    world = DecidedJob(2)
    world.train(1)
    world.say(1, "exit", rank=1, code=-15, **{**ENDED, "stopped": True})
    world.say(1, "end", stuck=[], signal=15)
    world.say(0, "lost", message="the connection was closed", time=2.0)
    with pytest.raises(LaunchError, match=r"^host0: the connection was closed; all its workers were stopped"):
        world.job.judge(world.now, [], [])


@pytest.mark.parametrize(("seconds", "heard", "follows"), [(2.0, True, True), (9.0, True, False), (9.0, False, True)])
def test_hosts_that_were_told_to_end_as_another_one_was_lost_are_no_preemption(
    seconds: float, heard: bool, follows: bool
) -> None:
    """seconds: until the launcher hears of the loss. heard: whether it hears that host until then."""
    world = DecidedJob(3, checkpoint_signal="USR1", grace=30.0)
    world.train(1)
    world.later(1.0, heard=range(3))
    for rank in (1, 2):
        world.later(0.1)
        world.say(rank, "preempted")
    world.later(seconds, heard=range(3) if heard else (1, 2))
    world.say(0, "lost", message="the connection was closed", time=2.0)
    for rank in (1, 2):
        world.say(rank, "exit", rank=rank, code=0, **{**ENDED, "stopped": False})
        world.say(rank, "end", stuck=[], signal=0)
    if follows:
        with pytest.raises(LaunchError, match=r"^host0: the connection was closed; all its workers were stopped"):
            world.job.judge(world.now, [], [])
    else:
        assert world.job.judge(world.now, [], []).exit_code == 75


@pytest.mark.parametrize(
    ("heard", "told", "silent", "preempted"),
    [(True, (1, 2), 1.0, True), (False, (1, 2), 1.0, False), (False, (1,), 1.0, True), (False, (1,), 9.0, False)],
)
def test_hosts_that_were_told_to_end_while_another_one_was_silent_are_no_preemption(
    heard: bool, told: Sequence[int], silent: float, preempted: bool
) -> None:
    """Where control is cut, the launcher never hears of the loss for which the cluster has ended all others. Where it
    has told one only, and the other has not been silent for long, that one may be taken away.

    silent: seconds without a sign of the other until then."""
    world = DecidedJob(3, checkpoint_signal="USR1", grace=1.0)
    world.train(1)
    world.nodes[0].heard = world.now
    world.later(silent, heard=(1, 2))
    for rank in (1, 2):
        world.nodes[rank].told = rank in told
        if rank in told:
            world.say(rank, "preempted")
        world.say(rank, "exit", rank=rank, code=0, **{**ENDED, "stopped": False})
        world.say(rank, "end", stuck=[], signal=0)
    world.later(7.0, heard=range(3) if heard else (1, 2))
    assert world.job.over
    if preempted:
        assert world.job.judge(world.now, [], []).exit_code == 75
    else:
        with pytest.raises(LaunchError, match=r"^host0: it is not known how rank 0 has ended"):
            world.job.judge(world.now, [], [])


def test_who_was_killed_once_an_agent_was_told_to_end_is_not_the_cause() -> None:
    """mpirun ends all ranks once one has been killed, as by an agent that is told to end."""
    world = DecidedJob(2)
    world.train(1)
    world.say(0, "exit", rank=0, code=-9, **{**ENDED, "time": 1.0, "stopped": True})
    world.say(1, "exit", rank=1, code=-9, **{**ENDED, "time": 1.3})
    world.say(1, "end", stuck=[], signal=0)
    world.say(0, "end", stuck=[], signal=15)
    with pytest.raises(LaunchError, match=r"^host0: the agent of this host .* was told to end by signal 15"):
        world.job.judge(world.now, [], [])


def test_a_stopped_rank_without_which_the_others_have_trained_on_is_not_the_cause() -> None:
    world = DecidedJob(4, island_size=2, island="2", min_np=1, timeout=30.0)
    world.train(1)
    world.say(1, "beat", steps={"1": [1, 40.0]}, memory={}, conditions={"1": "stopped"}, clock=0.0)
    world.later(40.0, heard=range(4))
    for rank in (2, 3):
        world.say(rank, "peers", rank=rank, line=1)
    world.later(5.0, heard=range(4))
    assert world.sent("regroup")[0]["members"] == [2, 3]
    world.say(0, "failed", rank=0, time=50.0, **{**WAITED, "type": "PeerLost", "message": "train on without this rank"})
    world.say(0, "exit", rank=0, code=1, **{**ENDED, "time": 51.0})
    world.say(1, "exit", rank=1, code=-9, **{**ENDED, "time": 51.0})
    world.say(3, "failed", rank=3, time=60.0, **WAITED)
    world.say(3, "exit", rank=3, code=1, **{**ENDED, "time": 61.0})
    world.say(2, "exit", rank=2, code=1, **{**ENDED, "time": 62.0, "stopped": True})
    failure = world.job.judge(world.now, [], []).failure
    assert failure is not None and failure.ending.rank == 3


def test_beside_an_agent_that_was_told_to_end_one_is_named_that_has_not_told_how_its_ranks_ended() -> None:
    world = DecidedJob(2)
    world.train(1)
    world.say(1, "exit", rank=1, code=-15, **{**ENDED, "stopped": True})
    world.say(1, "end", stuck=[], signal=15)
    text = r"^host1: .* was told to end by signal 15 .*; it is not known how rank 0 on host0 has ended"
    with pytest.raises(LaunchError, match=text):
        world.job.judge(world.now, [], [])


def test_of_several_that_have_not_told_how_their_ranks_ended_the_one_is_named_that_was_silent_first() -> None:
    world = DecidedJob(3)
    world.train(1)
    for rank in (0, 1):
        world.later(5.0)
        world.say(rank, "peers", rank=rank, line=1)
    waited = {**WAITED, "type": "CommTimeout", "message": "waited 12 s: rank 2 is unreachable"}
    world.say(1, "failed", rank=1, time=2.0, **waited)
    world.say(1, "exit", rank=1, code=1, **ENDED)
    world.say(1, "end", stuck=[], signal=0)
    with pytest.raises(LaunchError, match=r"^host2: it is not known how rank 2 has ended"):
        world.job.judge(world.now, [], [])


@pytest.mark.parametrize(
    ("reported", "told"),
    [
        (True, "rank 0 (has exited) cannot arrive any more"),
        (False, "worker 0 failed (ended too early, with exit code 0)"),
    ],
)
def test_a_rank_that_exits_before_it_trains_is_the_cause_of_what_its_island_says_of_it(
    reported: bool, told: str
) -> None:
    """reported: whether ranks of another island have waited for it, too, until then."""
    world = DecidedJob(4, island_size=2, island="2")
    words = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    facts = {**FAILED, "step": 0, "secondary": False, "line": 1}
    world.say(0, "exit", rank=0, code=0, **{**ENDED, "time": 1.0, "step": -1})
    world.say(1, "failed", rank=1, time=2.0, **{**facts, "type": "RuntimeError", "message": words})
    for rank in (2, 3):
        late = {**facts, "type": "StartTimeout", "message": f"rank {rank - 2} (has exited) cannot arrive any more"}
        if reported:
            world.say(rank, "failed", rank=rank, time=3.0, **late)
    for rank in (1, 2, 3):
        world.say(rank, "exit", rank=rank, code=1, **{**ENDED, "time": 4.0, "step": -1, "stopped": rank > 1})
    failure = world.job.judge(world.now, [], []).failure
    assert failure is not None and failure.lines()[0].startswith(told)


@pytest.mark.parametrize("on_stall", ["warn", "abort"])
@pytest.mark.parametrize(("seconds", "verdict"), [(5.0, "exit code 1"), (29.0, "stopped")])
def test_a_stopped_rank_is_the_cause_only_if_others_have_waited_for_it_for_long(
    seconds: float, verdict: str, on_stall: str
) -> None:
    world = DecidedJob(2, timeout=30.0, start_timeout=90.0, stall_warning=60.0, on_stall=on_stall)
    world.train(1)
    world.say(1, "beat", steps={}, memory={}, conditions={}, clock=0.0)
    world.say(0, "beat", steps={"0": [5, 0.0]}, memory={}, conditions={"0": "stopped"}, clock=0.0)
    world.later(seconds, heard=range(2))
    world.say(1, "failed", rank=1, time=1.0, **WAITED)
    world.say(1, "exit", rank=1, code=1, **ENDED)
    world.say(0, "exit", rank=0, code=-9, **{**ENDED, "stopped": True})
    failure = world.job.judge(world.now, [], []).failure
    assert failure is not None and f"({verdict})" in failure.lines()[0]


def test_a_rank_that_had_exited_before_others_waited_is_told_though_a_host_has_not_said_how_it_ended() -> None:
    world = DecidedJob(3)
    late = {**FAILED, "type": "StartTimeout", "message": "rank 0 cannot arrive any more", "secondary": False}
    world.say(0, "exit", rank=0, code=0, **{**ENDED, "time": 0.5})
    world.say(1, "failed", rank=1, time=0.9, **late)
    world.say(1, "exit", rank=1, code=1, **ENDED)
    failure = world.job.judge(world.now, [], []).failure
    assert failure is not None and failure.lines() == ["rank 0 cannot arrive any more"]


def test_a_rank_that_has_waited_is_not_blamed_for_one_of_which_nobody_knows() -> None:
    world = DecidedJob(2)
    world.train(1)
    world.say(1, "failed", rank=1, time=0.9, **WAITED)
    world.say(1, "exit", rank=1, code=1, **ENDED)
    world.say(1, "end", stuck=[], signal=0)
    world.later(1.5)
    world.later(10.0)
    assert world.job.overdue
    with pytest.raises(LaunchError, match="host0: it is not known how rank 0 has ended: its agent has not told"):
        world.job.judge(world.now, [], [])


def test_an_exception_that_was_reported_is_the_cause_though_the_agent_tells_nothing_after_it() -> None:
    world = DecidedJob(2)
    world.train(1)
    own = {**FAILED, "type": "ValueError", "message": "bad label", "secondary": False}
    world.say(0, "failed", rank=0, time=0.9, **own)
    world.later(1.5)
    world.say(1, "exit", rank=1, code=-15, **{**ENDED, "stopped": True})
    world.say(1, "end", stuck=[], signal=0)
    world.later(10.0)
    assert world.job.overdue
    failure = world.job.judge(world.now, [], []).failure
    assert failure is not None and (failure.ending.rank, failure.exit_code) == (0, 1)
    cause = "  cause   ValueError: bad label"
    assert cause in failure.lines() and not any("memory" in line for line in failure.lines())


def test_of_two_lost_hosts_the_first_one_is_named_whichever_is_reported_first() -> None:
    world = DecidedJob(3)
    world.train(1)
    world.say(2, "lost", message="the connection was closed", time=20.0)
    world.say(1, "lost", message="it has no power", time=10.0)
    world.later()
    with pytest.raises(LaunchError, match=r"host1: it has no power"):
        world.job.judge(world.now, [], [])


def test_a_stopped_rank_is_not_the_cause_where_a_host_was_told_to_end_before() -> None:
    world = DecidedJob(3)
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
