"""Jobs in the simulated world, of which each seed decides all that is left open."""

from __future__ import annotations

import pytest

from simulation.scenario import draw
from simulation.search import Found, shortest, simulate

SEEDS = 400
TOLD = """
{log}
seed {seed} fails; again: PYTHONPATH=tests:. python -m simulation --replay {seed}"""


def check(found: Found | None) -> None:
    if found is not None:
        lines = shortest(found).lines()
        pytest.fail(TOLD.format(log="\n".join(lines[-60:]), seed=found.scenario.seed))


@pytest.mark.parametrize("begin", range(0, SEEDS, 100))
def test_whatever_goes_wrong_all_holds_that_has_to(begin: int) -> None:
    for seed in range(begin, begin + 100):
        check(simulate(draw(seed)))


def test_the_same_seed_gives_the_same_job() -> None:
    scenario = next(scenario for seed in range(100) if len((scenario := draw(seed)).faults) > 2)
    first, second = (Found(scenario, "").lines() for _ in range(2))
    assert first == second
