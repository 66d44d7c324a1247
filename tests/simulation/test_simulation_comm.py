"""What ranks decide together, in a simulated world in which each seed decides all that is left open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from simulation.comm_faults import NamedFault, RankDies, SendsNonsense
from simulation.comm_gossip import GossipJob, draw_gossip
from simulation.comm_gossip_faults import IsReplaced
from simulation.comm_gossip_rank import GossipRank
from simulation.comm_negotiation import NegotiationJob
from simulation.comm_scenario import NamedTensor, NamedTensors, draw_tensors


def quiet(size: int, *faults: NamedFault, **changes: Any) -> NamedTensors:
    """Ranks that submit the same few tensors in three rounds, and these faults."""
    tensors = tuple(NamedTensor(f"t{number}") for number in range(3))
    scenario = replace(
        draw_tensors(0),
        size=size,
        latency=0.001,
        rounds=(tensors,) * 3,
        overlap=False,
        tolerant=True,
        cycle=0.001,
        cache=4096,
        step_seconds=0.1,
        joins={},
        faults=faults,
    )
    return replace(scenario, **changes)


@pytest.mark.parametrize("how", ["doubled", "older"])
def test_a_decision_that_comes_again_begins_nothing(how: str) -> None:
    job = NegotiationJob(quiet(3, SendsNonsense(0.25, 0, 0, how)))
    job.run()
    assert any("rank 0 has sent decision" in rank.failed for rank in job.ranks)


def test_a_decision_that_is_not_of_rank_0_is_refused() -> None:
    job = NegotiationJob(quiet(3, SendsNonsense(0.25, 1, 0, "foreign")))
    job.run()
    assert all("rank 1 sent what is no message" in rank.failed for rank in (job.ranks[0], job.ranks[2]))


def test_the_reason_of_an_end_goes_to_each_rank_once() -> None:
    job = NegotiationJob(quiet(16, RankDies(0.2, 5, 0)))
    job.run()
    for each in job.connections:
        assert each.wires[0].kinds["giving up"] <= 1, f"rank 0 tells rank {each.rank} {each.wires[0].kinds}"


def test_a_new_worker_outlives_a_loss_while_it_compares_itself_with_the_others() -> None:
    """A rank is lost as another one's successor tells how far it is."""
    scenario = replace(draw_gossip(0), size=4, latency=0.05, steps=20, step_seconds=(0.3,) * 4, timeout=15.0, min_np=1,
                       topology="ring", compression="none", notice_seconds=0.05)  # fmt: skip
    job = GossipJob(scenario)

    def regroup(rank: GossipRank) -> None:
        if rank.rank == 1 and 3 in rank.ranks.members and rank.ranks.generation > 1:
            rank.die(silent=True)
            job.strands.sleep(1.0)
        compare(rank)

    compare = GossipRank.regroup
    job.world.after(1.0, lambda: IsReplaced(1.0, 3).strike(job))
    job.struck.append(IsReplaced(1.0, 3))
    with patch.object(GossipRank, "regroup", regroup):
        job.run()
    assert job.ranks[3].joins
    assert [rank.rank for rank in job.ranks.values() if rank.error is None and rank.process.alive] == [0, 2, 3]
