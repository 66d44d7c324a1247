"""A rank that trains by gossip in a simulated world, on DADT's own algorithm, pairs, reconnection and recovery."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from dadt.algorithms.gossip.gossip import Gossip
from dadt.comm import peer_deaths
from dadt.comm.executors.meet import AllRanks, Apart
from dadt.comm.executors.point_to_point import NoPointToPoint
from dadt.comm.peer_deaths import Generation
from dadt.config import Config
from dadt.errors import CommError, CommTimeout, DadtError, PeerLost, StartTimeout
from dadt.train.events import Events
from dadt.train.loss.reconnection import Reconnection
from dadt.train.loss.recovery import Recovery
from dadt.train.trained import ParameterListing
from dadt.world import World as RankWorld
from simulation.comm_mail import SimulatedMail
from simulation.comm_members import MemberLine
from simulation.comm_strands import Strand, StrandEnded
from simulation.world import Broken, Crashed, Process

if TYPE_CHECKING:
    from simulation.comm_gossip import GossipJob

VALUES = 3


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
        self.started = self.trained = self.ended = False
        """Whether it has begun to train as the others, has made its steps, and has ended."""
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
        """All tell how far they are; one that has joined, or not begun, takes the weights of the first that trains."""
        ranks = self.ranks
        mine = self.parameters[0].numpy().tobytes() if self.started else b""
        told = ranks.mail.group.allgather(ranks.mail.rank, mine, ranks.config.timeout)
        if not self.started and (weights := next((each for each in told if each), b"")):
            self.parameters[0].copy_(torch.frombuffer(bytearray(weights), dtype=torch.float64))
            self.started = True

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
        job.attachments.append(self.attachment)
        self._start()
        self.gossip = self.attachment.algorithm = Gossip(self.attachment)  # type: ignore[arg-type]
        for _ in range(job.scenario.steps):
            strands.sleep(job.scenario.step_seconds[self.rank] * (0.5 + random.random()))
            self._step(random)
        self.trained = True
        ranks.closing = True
        job.launcher.ending(self.rank)
        self._arrive()

    def _start(self) -> None:
        """What Lockstep.join does: all compare what they train, unless others train already."""
        with self.ranks.as_a_whole():
            while not self.started:
                try:
                    self.ranks.allgather("start", b"")
                    self.started = True
                except CommError as error:
                    self.ranks.regroup(error)

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
        self.listing = ParameterListing()
        self.listing.ever.update(dict.fromkeys(rank.parameters, True))

    def _optimizer(self) -> GossipOptimizer:
        return self.optimizer

    def buffers(self) -> Sequence[Any]:
        return ()
