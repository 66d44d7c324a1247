"""What is simulated, and the deliberate faults that have to be found in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulation.comm_gossip import GossipJob, draw_gossip
from simulation.comm_mutations import COMM_MUTATIONS
from simulation.comm_negotiation import NegotiationJob
from simulation.comm_scenario import draw_tensors
from simulation.island_draws import draw_islands
from simulation.island_mutations import ISLAND_MUTATIONS
from simulation.mutations import JOB_MUTATIONS
from simulation.run import SimulatedRun
from simulation.scenario import draw
from simulation.search import Simulation
from simulation.start_mutations import START_MUTATIONS
from simulation.training_mutations import TRAINING_MUTATIONS

JOBS = Simulation("jobs", draw, SimulatedRun)
ISLANDS = Simulation("islands", draw_islands, SimulatedRun)
NEGOTIATION = Simulation("negotiation", draw_tensors, NegotiationJob)
GOSSIP = Simulation("gossip", draw_gossip, GossipJob)
KINDS = {each.name: each for each in (JOBS, ISLANDS, NEGOTIATION, GOSSIP)}
MUTATIONS: Mapping[str, tuple[str, Any, str, Any]] = {
    **{
        name: (JOBS.name, *mutation)
        for name, mutation in {**JOB_MUTATIONS, **START_MUTATIONS, **TRAINING_MUTATIONS}.items()
    },
    **{name: (ISLANDS.name, *mutation) for name, mutation in ISLAND_MUTATIONS.items()},
    **COMM_MUTATIONS,
}
"""Each fault by what it is: the kind of simulation that finds it, what it replaces, and by what."""
MOST_SEEDS = 5000
"""By how many seeds a deliberate fault has to be found."""
