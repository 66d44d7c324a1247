"""Simulates jobs by their seeds, and finds the shortest list of faults by which one still fails."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulation.job import SimulatedJob
from simulation.scenario import Scenario, draw
from simulation.world import Broken, Crashed

CRASHED = "the code under test has raised:"
"""How the reason of a job begins in which an exception came out of the decisions, and no check has failed."""


@dataclass(frozen=True, slots=True)
class Found:
    """A job in which something did not hold."""

    scenario: Scenario
    why: str

    def lines(self) -> list[str]:
        """What has happened in it, in virtual time."""
        job = SimulatedJob(self.scenario, logs=True)
        why = why_of(job)
        log = [f"{at:9.3f} s  {who:9}  {text}" for at, who, text in job.world.log or []]
        return [*self.scenario.lines(), *log, f"seed {self.scenario.seed}: {why}"]


def why_of(job: SimulatedJob) -> str:
    """Run it. Returns what did not hold in it; empty if all did."""
    try:
        job.run()
    except Broken as broken:
        return str(broken)
    except (Exception, Crashed):  # the decisions themselves have failed
        return f"{CRASHED}\n{traceback.format_exc()}"
    return ""


def simulate(scenario: Scenario) -> Found | None:
    why = why_of(SimulatedJob(scenario))
    return Found(scenario, why) if why else None


def shortest(found: Found) -> Found:
    """The same with as few faults as possible."""
    place = 0
    while place < len(found.scenario.faults):
        left = found.scenario.faults[:place] + found.scenario.faults[place + 1 :]
        fewer = simulate(replace(found.scenario, faults=left))
        if fewer is not None:
            found = fewer
        else:
            place += 1
    return found


def first_of(seeds: Sequence[int]) -> Found | None:
    """The first of these jobs in which something does not hold."""
    return next((found for seed in seeds if (found := simulate(draw(seed))) is not None), None)
