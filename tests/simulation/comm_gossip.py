"""Ranks that train by gossip in a simulated world: DADT's own algorithm, pairs, reconnection and recovery."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from random import Random

import torch

from dadt.algorithms.gossip import edge, finish, pairing
from dadt.algorithms.gossip import gossip as gossip_module
from dadt.algorithms.gossip.topology import neighbours
from dadt.comm import peer_deaths
from dadt.train.loss import pause, reconnection, recovery
from simulation.comm_gossip_faults import GossipFault, draw_gossip_fault
from simulation.comm_gossip_rank import GossipAttachment, GossipRank
from simulation.comm_mail import MailGroup
from simulation.comm_members import MembersLauncher
from simulation.comm_strands import Strands
from simulation.world import BEGIN, Broken, World

PATCHED = (edge, finish, pairing, gossip_module, peer_deaths, pause, reconnection, recovery)
MOST_WORLD_EVENTS = 60_000
"""Events of one simulation, far above what any takes."""


@dataclass(frozen=True, slots=True)
class Gossiping:
    """Ranks that train by gossip, and what goes wrong."""

    seed: int
    size: int
    topology: str
    latency: float
    steps: int
    step_seconds: tuple[float, ...]
    """For each rank."""
    compression: str
    timeout: float
    min_np: int
    notice_seconds: float
    """What the launcher takes to notice a loss."""
    faults: tuple[GossipFault, ...] = ()

    @property
    def limit(self) -> float:
        trains = 2 * self.steps * max(self.step_seconds)
        return 20.0 + trains + (2 + len(self.faults)) * (2 * self.timeout + 30.0) + sum(f.seconds for f in self.faults)

    def lines(self) -> list[str]:
        told = [
            f"{self.size} ranks, {self.topology}, {self.compression=} {self.latency=} {self.steps=}",
            f"{self.step_seconds=} {self.timeout=} {self.min_np=} {self.notice_seconds=}",
        ]
        return told + [f"fault: {fault}" for fault in self.faults]


def draw_gossip(seed: int) -> Gossiping:
    random = Random(seed)
    size = random.choices([2, 3, 4, 5, 8, 16], [6, 6, 6, 3, 2, 0.3])[0]
    steps = random.randint(3, 20)
    pace = random.choice([0.05, 0.3, 1.0])
    paces = tuple(pace * random.choice([0.5, 1.0, 1.0, 4.0]) for _ in range(size))
    span = 0.5 + steps * pace
    number = random.choices(range(4), [4, 4, 2, 1])[0]
    ats = sorted(random.uniform(0.1, span) for _ in range(number))
    return Gossiping(
        seed,
        size,
        random.choice(["ring", "ring", "exponential", "complete"]),
        random.choice([0.001, 0.02, 0.3]),
        steps,
        paces,
        random.choice(["none", "none", "int8", "powersgd:1"]),
        random.choice([6.0, 15.0]),
        random.choice([0, 1, 1, 1]),
        random.choice([0.05, 1.0, 5.0]),
        tuple(draw_gossip_fault(random, at, size) for at in ats),
    )


class GossipJob:
    """The ranks of one scenario, and the world between them."""

    def __init__(self, scenario: Gossiping, *, logs: bool = False) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed, logs=logs)
        self.strands = Strands(self.world)
        self.launcher = MembersLauncher(self.strands, scenario.size, self._kill)
        self._groups: dict[tuple[int, tuple[int, ...]], MailGroup] = {}
        self.cuts: set[tuple[int, int]] = set()
        self.struck: list[GossipFault] = []
        self.ranks: dict[int, GossipRank] = {}
        self.attachments: list[GossipAttachment] = []
        self.lost_at: dict[int, float] = {}

    def run(self) -> None:
        """Raises Broken if something does not hold that has to."""
        with ExitStack() as stack:
            stack.enter_context(self.strands.patched(*PATCHED))
            stack.callback(self._end)
            stack.enter_context(torch.no_grad())
            self.ranks = {rank: GossipRank(self, rank) for rank in range(self.scenario.size)}
            for fault in self.scenario.faults:
                self.world.after(fault.at, lambda fault=fault: self._strike(fault))
            if not self.world.run(self._is_over, self.world.now + self.scenario.limit):
                late = [rank.rank for rank in self._living if not rank.ended]
                raise Broken(f"ranks {late} have not ended within {self.scenario.limit:.0f} s")
            self._check_end()

    def _end(self) -> None:
        self.launcher.stops = True
        self.strands.end()
        for attachment in self.attachments:
            del attachment.optimizer  # with its end, Python forgets what it has to call then, and so all of this world

    def _is_over(self) -> bool:
        if self.world.events > MOST_WORLD_EVENTS:
            raise Broken(f"more than {MOST_WORLD_EVENTS:,} events")
        return all(rank.ended for rank in self._living)

    @property
    def _living(self) -> list[GossipRank]:
        return [rank for rank in self.ranks.values() if rank.process.alive]

    def _strike(self, fault: GossipFault) -> None:
        if fault.strike(self):
            self.world.note("fault", f"{fault}")
            self.struck.append(fault)

    def reaches(self, one: int, other: int) -> bool:
        return (one, other) not in self.cuts and (one not in self.ranks or self.ranks[one].process.alive)

    def group_of(self, generation: int, members: tuple[int, ...]) -> MailGroup:
        key = generation, members
        if key not in self._groups:
            self._groups[key] = MailGroup(self.strands, members, self.scenario.latency, self.reaches)
        return self._groups[key]

    def lost(self, rank: GossipRank, *, silent: bool) -> None:
        """The process of a rank is gone: some libraries notice that, and the launcher does after a while."""
        world = self.world
        self.lost_at[rank.rank] = world.now
        if (mail := rank.ranks.connection) is not None and not silent:
            for index in range(len(mail.group.members)):
                if world.random.random() < 0.5:
                    world.after(world.spread(self.scenario.latency), lambda i=index: mail.group.notice(mail.rank, i))
        # A rank for which all others wait is given up before they would.
        seconds = min(self.scenario.notice_seconds, self.scenario.timeout / 4) * (2.0 if silent else 1.0)
        world.after(world.spread(seconds), lambda: self._tell(rank.rank))

    def _kill(self, rank: int) -> None:
        """The launcher kills the process of a rank without which the others train on."""
        self.ranks[rank].process.alive = False
        self.lost_at[rank] = self.world.now

    def replace(self, lost: GossipRank) -> None:
        """Start a new worker in the place of a lost one, if anybody still trains."""
        if any(not rank.ranks.closing for rank in self._living) and not lost.process.alive:
            self.ranks[lost.rank] = GossipRank(self, lost.rank, joins=True)

    def _tell(self, lost: int) -> None:
        text = f"rank {lost} was killed"
        if self.scenario.min_np:
            self.launcher.rendezvous.members[lost].ended = True
            self.launcher.begin([lost], text)
            return
        self.launcher.rendezvous.members[lost].ended = True
        for rank in self._living:
            self.strands.as_thread(rank.process, f"news of {rank.rank}", lambda rank=rank: rank.ranks.deaths.tell(text))

    def check_asked(self, rank: GossipRank) -> None:
        """A rank asks one neighbour at a time, unless an answer is late, and no rank that is not a member any more."""
        assert rank.gossip is not None
        pairs, world = rank.gossip._pairing, self.world
        under_way = [
            peer for peer, each in pairs._asking.items() if each.asked is not None and world.now - each.asked < 1.0
        ]
        if len(under_way) > 1:
            raise Broken(f"rank {rank.rank} asks {under_way} at once")
        members = len(pairs._members)
        if set(pairs._edges) != set(neighbours(self.scenario.topology, pairs._group.rank, members)):
            raise Broken(f"rank {rank.rank} of {members} has edges to {sorted(pairs._edges)}")
        known = self.scenario.notice_seconds * 1.5 + self.scenario.timeout + 25.0
        for lost, at in self.lost_at.items():
            if (
                lost in pairs._members
                and not self.ranks[lost].process.alive
                and world.now - at > known
                and self.scenario.min_np
            ):
                raise Broken(f"rank {rank.rank} is paired with rank {lost} {world.now - at:.1f} s after its loss")

    def _check_end(self) -> None:
        living = self._living
        if not self.struck and (failed := next((rank for rank in living if rank.error is not None), None)):
            raise Broken(f"nothing was wrong, and rank {failed.rank} fails: {failed.error}")
        for rank in living:
            if rank.late > 0.5 and not any(fault.holds for fault in self.struck):
                raise Broken(f"a step of rank {rank.rank} has waited {rank.late:.1f} s")
            if rank.error is not None and self.scenario.min_np and not any(fault.holds for fault in self.struck):
                raise Broken(
                    f"the others train on, and rank {rank.rank} fails: {type(rank.error).__name__}: {rank.error}"
                )
        good = [rank for rank in living if rank.error is None]
        sums = {tuple(rank.parameters[0].tolist()) for rank in good}
        if len(sums) > 1:
            raise Broken(f"after the last average weights differ: {sums}")
        whole = sum(rank.given + rank.rank + 1 for rank in living)
        if good and not self.struck and abs(good[0].parameters[0][0].item() * len(living) - whole) > 1e-6:
            raise Broken(
                f"all weights together are {good[0].parameters[0][0].item() * len(living)}, and should be {whole}"
            )
        asked = sum(rank.gossip._pairing.asked for rank in living if rank.gossip is not None)
        paces = self.scenario.step_seconds
        meet = self.scenario.steps * min(paces) > 3 * max(paces)
        if meet and not self.struck and not asked and self.world.now - BEGIN > 20 * self.scenario.latency + 2.0:
            raise Broken("nobody has averaged with anybody")
