"""A silence and a death within a second: both are borne in the time of one wait, in whatever phase they strike."""

from __future__ import annotations

import re

import pytest
from harness.at_once import RANKS, Struck, drawn, strike


@pytest.mark.slow
def test_a_stopped_rank_and_a_killed_one(launch) -> None:
    job = Struck({1: ("stop", "forward"), 2: ("kill", "exchange")}, ("--algorithm", "pipe", "--executor", "gloo"))
    result = strike(launch, job)
    awaited = r"dadt: warning: ranks 0, 3, 4 and 5 wait for 'generation 1 gloo .*': rank 1 \(is stopped \(SIGSTOP"
    assert re.search(awaited, result.err), result.err


@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", ["sync", "pipe", "local"])
def test_a_rank_ends_while_the_others_compare_what_they_have_after_another(launch, algorithm: str) -> None:
    """They begin the step once more that they had begun anew before."""
    options = ("--algorithm", algorithm, "--executor", "gloo", "--sync-every", "4")
    strike(launch, Struck({1: ("kill", "step"), 2: ("kill", "compare")}, options, equal=algorithm != "local"))


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(60))
def test_two_or_three_faults_in_any_phase(launch, seed: int) -> None:
    strike(launch, drawn(seed))


@pytest.mark.slow
def test_too_few_are_left(launch) -> None:
    """The others learn of it at once, and not from waits of their own."""
    faults = dict.fromkeys(range(1, RANKS), ("stop", "forward"))
    job = Struck({**faults, 1: ("kill", "exchange")}, ("--algorithm", "sync", "--executor", "shm", "--min-np", "2"))
    result = strike(launch, job, code=1)
    assert re.search(r"were silent for 8 s, and too few are left without them", result.err), result.err
