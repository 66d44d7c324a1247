"""Ranks that train by gossip in a simulated world: DADT's own algorithm, pairs, reconnection and recovery."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from dadt.algorithms.gossip import edge, finish, pairing
from dadt.algorithms.gossip import gossip as gossip_module
from dadt.algorithms.gossip.gossip import Gossip
from dadt.algorithms.gossip.topology import neighbours
from dadt.comm import peer_deaths
from dadt.comm.executors.meet import AllRanks, Apart
from dadt.comm.executors.point_to_point import NoPointToPoint
from dadt.comm.peer_deaths import Generation
from dadt.config import Config
from dadt.errors import CommError, CommTimeout, DadtError, PeerLost, StartTimeout
from dadt.train.events import Events
from dadt.train.loss import pause, reconnection, recovery
from dadt.train.loss.reconnection import Reconnection
from dadt.train.loss.recovery import Recovery
from dadt.world import World as RankWorld
from simulation.comm_gossip_faults import GossipFault, draw_gossip_fault
from simulation.comm_mail import MailGroup, SimulatedMail
from simulation.comm_members import MemberLine, MembersLauncher
from simulation.comm_strands import Strand, StrandEnded, Strands
from simulation.world import BEGIN, Broken, Crashed, Process, World

PATCHED = (edge, finish, pairing, gossip_module, peer_deaths, pause, reconnection, recovery)
VALUES = 3
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


class GossipRecovery(Recovery):
    """How a rank connects anew, with connections of the simulated world."""

    rank: GossipRank

    def _connected(self) -> Any:
        try:
            return self.rank.connected()
        except DadtError:
            raise
        except Exception as error:
            raise Crashed(f"{self.rank.process.name} cannot connect") from error

    def regroup(self) -> None:
        self.rank.regroup()


class GossipRanks:
    """One rank among all ranks, as far as gossip asks (dadt/train/ranks.py)."""

    together = False
    alone = False

    def __init__(self, job: GossipJob, process: Process, rank: int, *, joins: bool) -> None:
        scenario = job.scenario
        self.job = job
        self.world = self.group = RankWorld(rank=rank, world_size=scenario.size, joins=joins)
        self.members: Sequence[int] = range(scenario.size)
        self.config = Config(
            algorithm="gossip",
            topology=scenario.topology,
            compression=scenario.compression,
            timeout=scenario.timeout,
            start_timeout=scenario.timeout,
            min_np=scenario.min_np,
        )
        self.mail: Any = NoPointToPoint()
        self.engine = SimpleNamespace(error=None)
        self.connection: Any = None
        self.timeline = None
        self.step = 0
        self.closing = False
        self.progress = SimpleNamespace(senders=[], stood=0.0)
        self.requests = SimpleNamespace(approaches=SimpleNamespace(begin_anew=lambda: None))
        self.deaths = peer_deaths.Deaths()
        self.deaths.listening = True
        self.control = MemberLine(job.launcher, process, rank)
        self.connect_anew: Callable[..., None] = lambda error: None
        most = scenario.timeout + scenario.timeout
        self.reconnection = Reconnection(self.deaths, lambda error: self.connect_anew(error), most)

    @property
    def survives(self) -> bool:
        return self.config.min_np > 0

    @property
    def generation(self) -> int:
        return self.group.generation

    @property
    def meet(self) -> Any:
        group = self.group
        meet = AllRanks(group, self.control, self.config.timeout, lambda: self.deaths.outdated)  # type: ignore[arg-type]
        return Apart(meet, f"generation {group.generation}") if group.generation else meet

    def enter(self, generation: Generation) -> None:
        self.members = generation.members
        self.group = self.world.among(self.members, generation.number)

    def use(self, connection: SimulatedMail) -> None:
        self.connection, self.mail = connection, connection
        self.engine = SimpleNamespace(error=None)
        self.deaths.watch(self.abort)

    def abort(self, reason: str, lost: bool = False) -> None:
        self.engine.error = reason
        if self.connection is not None:
            self.connection.group.fail(self.connection.rank, PeerLost(reason))

    def hang_up(self) -> None:
        self.abort("hung up")

    @contextmanager
    def as_a_whole(self) -> Iterator[None]:
        with self.reconnection.within():
            yield

    def regroup(self, error: CommError) -> None:
        if self.survives:
            self.reconnection.wait(error)
        else:
            self.connect_anew(error)

    def say(self, text: str, level: str = "info") -> None:
        self.job.world.note(f"rank {self.world.rank}", f"{level}: {text}")

    def tell_waiting(self, what: str, waited: float) -> None:
        self.say(f"waits in {what} for {waited:.0f} s")

    def allgather(self, name: str, data: bytes) -> Any:
        self.reconnection.check()
        return SimpleNamespace(lanes=self.mail.group.allgather(self.mail.rank, data, self.config.timeout))

    def wait(self, work: Any) -> None: ...

    def average(self, tensors: Sequence[torch.Tensor], name: str, weight: float = 1.0) -> None:
        for tensor in tensors:
            given = self.allgather(name, tensor.numpy().tobytes()).lanes
            values = [torch.frombuffer(bytearray(each), dtype=tensor.dtype) for each in given]
            tensor.copy_(torch.stack(values).mean(0).view(tensor.shape))


class GossipRank:
    """One process that trains by gossip."""

    def __init__(self, job: GossipJob, rank: int, *, joins: bool = False) -> None:
        self.job, self.rank, self.joins = job, rank, joins
        self.process = Process(job.world, f"rank {rank}")
        self.parameters = [torch.full((VALUES,), float(rank + 1), dtype=torch.float64)]
        self.given = 0.0
        """What its steps have added to its weights."""
        self.trained = self.ended = False
        self.error: Exception | None = None
        self.late = 0.0
        self.events = Events()
        self.ranks = GossipRanks(job, self.process, rank, joins=joins)
        stand_in: Any = SimpleNamespace(keep=None, aside=nullcontext, missing=lambda count: "")
        self.recovery = GossipRecovery(
            self.ranks,
            stand_in,
            stand_in,
            stand_in,
            stand_in,
            stand_in,
            stand_in,
            self.events,  # type: ignore[arg-type]
        )
        self.recovery.rank = self
        self.ranks.connect_anew = self.recovery.connect_anew
        self.gossip: Gossip | None = None
        job.launcher.hears[rank] = self.process, self.hear
        self.strand: Strand = job.strands.start(self.process, f"rank {rank}", self._run)

    def hear(self, generation: Generation) -> None:
        self.ranks.deaths.regroup(generation)
        if self.ranks.connection is not None:
            self.job.strands.as_thread(self.process, f"news of {self.rank}", self.ranks.reconnection.begin)

    # Connecting --------------------------------------------------------------------------------------------------

    def connected(self) -> SimulatedMail:
        ranks = self.ranks
        met = ranks.meet.exchange("connect", f"{self.rank}".encode())
        told = [int(blob) for blob in met]
        if told != list(ranks.members):
            raise Broken(f"rank {self.rank} meets ranks {told}, and its members are {list(ranks.members)}")
        self.job.strands.sleep(self.job.world.spread(self.job.scenario.latency))
        return SimulatedMail(self.job.group_of(ranks.group.generation, tuple(ranks.members)), ranks.group.rank)

    def regroup(self) -> None:
        """All tell how far they are; one that has joined takes the weights of the first that trains."""
        ranks = self.ranks
        told = ranks.mail.group.allgather(
            ranks.mail.rank,
            b"" if self.joins and not self.trained and self.gossip is None else self.parameters[0].numpy().tobytes(),
            ranks.config.timeout,
        )
        if self.gossip is None and self.joins and (weights := next((each for each in told if each), b"")):
            self.parameters[0].copy_(torch.frombuffer(bytearray(weights), dtype=torch.float64))

    # Training ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._train()
        except (CommError, StartTimeout) as error:
            self.error = error
            self.job.world.note(self.process.name, f"fails: {type(error).__name__}: {error}")
            self.ranks.abort(f"rank {self.rank} failed")
        finally:
            self.ended = True
        self.job.launcher.finished(self.rank, self.error, survives=self.ranks.survives)
        if self.gossip is not None:
            self.ranks.reconnection.close()
            for callback in self.events.on_stop:
                callback()

    def _train(self) -> None:
        job, ranks, strands = self.job, self.ranks, self.job.strands
        random = Random(f"{job.scenario.seed} {self.rank} {self.joins}")
        strands.sleep(job.world.spread(0.2))
        if self.joins and not job.launcher.join(self.rank, f"rank {self.rank} has joined"):
            self.process.alive = False  # the launcher kills it
            raise StrandEnded
        self.recovery.join()
        self.attachment = GossipAttachment(self)
        self.gossip = self.attachment.algorithm = Gossip(self.attachment)  # type: ignore[arg-type]
        for _ in range(job.scenario.steps):
            strands.sleep(job.scenario.step_seconds[self.rank] * (0.5 + random.random()))
            self._step(random)
        self.trained = True
        ranks.closing = True
        job.launcher.ending(self.rank)
        self._arrive()

    def _step(self, random: Random) -> None:
        assert self.gossip is not None
        begun = self.job.world.now
        self.gossip.before_step()
        step = float(random.randint(-4, 4))
        self.parameters[0] += step
        self.given += step
        self.ranks.step += 1
        self.job.launcher.stepped(self.rank, self.ranks.step)
        self.gossip.after_step()
        self.late = max(self.late, self.job.world.now - begun)
        self.job.check_asked(self)

    def _arrive(self) -> None:
        """What Departure does where ranks do not step together."""
        with self.ranks.reconnection.within():
            while True:
                try:
                    for callback in self.events.on_end:
                        callback()
                    self._meet_at_the_end()
                    return
                except CommError as error:
                    if not self.ranks.survives:
                        raise
                    self.job.world.note(self.process.name, f"begins its end anew: {error}")
                    self.ranks.reconnection.wait(error)

    def _meet_at_the_end(self) -> None:
        try:
            self.ranks.meet.exchange("the end", b"the end")
        except StartTimeout as error:
            raise CommTimeout(str(error)) from error

    def die(self, *, silent: bool) -> None:
        self.process.alive = False
        self.job.lost(self, silent=silent)


class GossipOptimizer:
    """Stands for an optimizer of these parameters."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.param_groups = [{"params": parameters}]


class GossipAttachment:
    """Stands for the attachment of a rank's optimizer (dadt/train/attachment.py)."""

    algorithm: Gossip
    index = 0
    modules = siblings = ()
    name = ""

    def __init__(self, rank: GossipRank) -> None:
        self.ranks, self.events = rank.ranks, rank.events
        self.optimizer = GossipOptimizer(rank.parameters)
        self.changing_buffers = SimpleNamespace(select=lambda: None)

    def _optimizer(self) -> GossipOptimizer:
        return self.optimizer

    def buffers(self) -> Sequence[Any]:
        return ()


class GossipJob:
    """The ranks of one scenario, and the world between them."""

    def __init__(self, scenario: Gossiping, *, logs: bool = False) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed, logs=logs)
        self.strands = Strands(self.world)
        self.launcher = MembersLauncher(self.strands, scenario.size)
        self._groups: dict[tuple[int, tuple[int, ...]], MailGroup] = {}
        self.cuts: set[tuple[int, int]] = set()
        self.struck: list[GossipFault] = []
        self.ranks: dict[int, GossipRank] = {}
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


__all__ = ["GossipJob", "Gossiping", "draw_gossip", "replace"]
