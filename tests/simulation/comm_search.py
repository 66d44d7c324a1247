"""Simulates what ranks do with each other by seeds, and finds the shortest list of faults by which that still fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from simulation.comm_gossip import GossipJob, draw_gossip
from simulation.comm_negotiation import NegotiationJob
from simulation.comm_scenario import draw_tensors
from simulation.world import BEGIN, Broken, Crashed, World


class CommScenario(Protocol):
    """What a seed decides."""

    seed: int
    faults: tuple[Any, ...]

    def lines(self) -> list[str]: ...


class CommJob(Protocol):
    """A simulation of one scenario."""

    world: World

    def run(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SimulationKind:
    """One kind of simulation: how a seed is drawn, and what runs it."""

    draw: Callable[[int], Any]
    job: Callable[..., CommJob]

    def fail(self, scenario: CommScenario) -> str:
        """Run it. Returns what did not hold in it; empty if all did."""
        return _why(self.job(scenario))

    def lines(self, scenario: CommScenario) -> list[str]:
        """What happens in it, in virtual time."""
        job = self.job(scenario, logs=True)
        why = _why(job)
        log = [f"{at:9.4f} s  {who:9}  {text}" for at, who, text in job.world.log or []]
        return [*scenario.lines(), *log, f"{job.world.now - BEGIN:9.4f} s  seed {scenario.seed}: {why or 'all holds'}"]

    def shortest(self, scenario: Any) -> Any:
        """The same with as few faults as possible."""
        place = 0
        while place < len(scenario.faults):
            fewer = replace(scenario, faults=scenario.faults[:place] + scenario.faults[place + 1 :])
            if self.fail(fewer):
                scenario = fewer
            else:
                place += 1
        return scenario

    def first_of(self, seeds: Iterable[int]) -> tuple[Any, str] | None:
        """The first of these seeds with which something does not hold, and what that is."""
        for seed in seeds:
            if why := self.fail(scenario := self.draw(seed)):
                return scenario, why
        return None


KINDS: Mapping[str, SimulationKind] = {
    "negotiation": SimulationKind(draw_tensors, NegotiationJob),
    "gossip": SimulationKind(draw_gossip, GossipJob),
}
CRASHED = "the code under test has raised:"


def _why(job: CommJob) -> str:
    try:
        job.run()
    except Broken as broken:
        return str(broken)
    except (Exception, Crashed):  # the decisions themselves have failed
        return f"{CRASHED}\n{traceback.format_exc()}"
    return ""
