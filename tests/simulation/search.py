"""Simulates by seeds, and finds the shortest list of faults by which a simulation still fails."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from simulation.world import BEGIN, Broken, Crashed, World

CRASHED = "the code under test has raised:"
"""How a reason begins where an exception came out of the decisions, and no check has failed."""


SELDOM = 20_000, 20, 100
"""Thresholds of the garbage collector, which takes a seventh of all time with Python's own."""


@contextmanager
def collects_seldom() -> Iterator[None]:
    """The garbage collector looks seldom meanwhile, and not at what there is already."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class Simulated(Protocol):
    """A simulation of one scenario."""

    world: World

    def run(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Simulation:
    """One kind of simulation: how a seed is drawn, and what runs it. A scenario has its seed and its faults, and lines
    that tell of them."""

    name: str
    draw: Callable[[int], Any]
    job: Callable[..., Simulated]

    def fail(self, scenario: Any) -> str:
        """Run it. Returns what did not hold in it; empty if all did."""
        return _why(self.job(scenario))

    def lines(self, scenario: Any) -> list[str]:
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

    def report(self, scenario: Any) -> list[str]:
        """What happens with as few faults as possible, and how it is seen again."""
        again = f"again: PYTHONPATH=tests:. python -m simulation --kind {self.name} --replay {scenario.seed}"
        return [*self.lines(self.shortest(scenario)), again]


def _why(job: Simulated) -> str:
    try:
        job.run()
    except Broken as broken:
        return str(broken)
    except (Exception, Crashed):  # the decisions themselves have failed
        return f"{CRASHED}\n{traceback.format_exc()}"
    return ""
