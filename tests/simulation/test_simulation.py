"""Jobs in the simulated world, of which each seed decides all that is left open."""

from __future__ import annotations

import pytest

from simulation.mutations import MOST_SEEDS, MUTATIONS, mutated
from simulation.scenario import draw
from simulation.search import CRASHED, Found, first_of, shortest, simulate

SEEDS = 2000
AT_ONCE = 250
LINES = 60


def check(found: Found | None) -> None:
    if found is not None:
        again = f"again: PYTHONPATH=tests:. python -m simulation --replay {found.scenario.seed}"
        pytest.fail("\n".join([*shortest(found).lines()[-LINES:], again]))


@pytest.mark.parametrize("begin", range(0, SEEDS, AT_ONCE))
def test_whatever_goes_wrong_all_holds_that_has_to(begin: int) -> None:
    check(first_of(range(begin, begin + AT_ONCE)))


def test_a_job_of_many_hosts() -> None:
    check(simulate(next(each for seed in range(10_000) if (each := draw(seed)).hosts == 64 and len(each.faults) > 2)))


def test_the_same_seed_gives_the_same_job() -> None:
    scenario = next(scenario for seed in range(100) if len((scenario := draw(seed)).faults) > 2)
    first, second = (Found(scenario, "").lines() for _ in range(2))
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_deliberate_fault_is_found(name: str) -> None:
    with mutated(name):
        found = first_of(range(MOST_SEEDS))
    assert found is not None and not found.why.startswith(CRASHED), (
        found
    )  # a mutation that is itself broken finds nothing
