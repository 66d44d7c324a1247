"""This rank among its peers: what connects it with them, what they send each other, and waiting for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from dadt.comm import executors, plain
from dadt.comm.bucket import DTYPES, split
from dadt.comm.executors.meet import AllRanks, Apart, Meet
from dadt.comm.executors.point_to_point import NoPointToPoint
from dadt.comm.keepalive import leak
from dadt.comm.peer_deaths import Abort, Deaths, Generation
from dadt.comm.trace import gather as trace
from dadt.comm.trace.merge import merge
from dadt.comm.trace.recorder import Timeline
from dadt.config import Config
from dadt.config.executor import executors_of
from dadt.control import snapshots
from dadt.control.worker_line import WorkerLine
from dadt.errors import CommError, CommTimeout, DadtError, Mismatch, PeerLost, StartTimeout, Unproved
from dadt.train.approaches import Approaches
from dadt.train.checkpoint_signal import CheckpointSignal
from dadt.train.exchange.background import Background
from dadt.train.gathering import Gathering
from dadt.train.in_flight import Flights, InFlight
from dadt.train.interruption import Interruption
from dadt.train.progress import Progress
from dadt.train.reconnection import Reconnection
from dadt.train.stall import PATIENCE, Stall
from dadt.world import World

if TYPE_CHECKING:
    from dadt._core import Engine, Layout, Work
    from dadt.comm.executors.base import Connection, P2PWork, PointToPoint
    from dadt.comm.executors.device import Averaging, Device

REGROUP_SECONDS = 10.0
"""Seconds that the launcher may take to say who trains on, once a library has noticed the end of a host."""

_MERGE_SECONDS = 300.0  # that making one timeline of all ranks' may take

_NAMED = re.compile(r'("[^"]*")|\brank (\d+)\b')
KEPT = 16
"""Gatherings that a rank keeps, as another one may still wait for them."""


class Peers:
    """Every rank calls the methods that exchange in the same order, on the script's training thread."""

    def __init__(self, world: World, config: Config, control: WorkerLine | None) -> None:
        self.world = world
        """This rank among those that the job began with."""
        self.group = world
        """This rank among those that train now; others may have been lost."""
        self.members: Sequence[int] = range(world.world_size)
        """The ranks that train now, in the order of the group."""
        self.first = world.local_rank == 0 and not world.joins
        """Whether this rank is the first of its host, which writes files for good."""
        self.folder_writer = world.folder_writer  # as in World, of those that train now
        self.config = config
        self.control = control
        self.progress = Progress()
        self.replays = bool(config.resume or config.snapshot_dir)  # its script is made again, or may be later
        self._stood_for = snapshots.shares(Path(config.resume)) if config.resume else 1
        self.deaths = Deaths()
        self.timeline: Timeline | None = None
        self.mail: PointToPoint = NoPointToPoint()
        """Sends and receives messages between two ranks."""
        self.background: Background
        """Computes what has to be between two operations of the engine."""
        self.device: Device | None = None  # that averages tensors of this rank's GPU where they are
        self.parted = False  # ranks have taken steps of their own
        self.flights = Flights()
        self.gatherings: list[Gathering] = []  # the newest, in order, some of which may not be done
        self.gathered = 0  # how many there were
        self.transaction: float | None = None
        """When this rank began what is done as a whole or not at all; None outside of that."""
        self.welcome: list[Any] = []  # what a rank that joins a running job was given, by attachment
        self.checkpoint_signal, self.interruption = CheckpointSignal(), Interruption()
        self.approaches = Approaches()
        self.closing = False  # this rank is at its end, where others are, too
        self._engine: Engine | None = None
        self._broadcaster: Engine
        self._disconnect: Callable[[], bool] = lambda: True
        self._failed: list[Any] = []  # what failed operations need
        self._abort: Abort = lambda reason, lost: None
        self._told: set[str] = set()
        self._stall = Stall(config, world.rank, control, partial(self.say, level="warning"))
        self.reconnection = Reconnection(self, config.timeout + config.start_timeout)

    @property
    def step(self) -> int:
        """Optimizer steps that this rank has taken, over all optimizers."""
        return self.progress.step

    @property
    def generation(self) -> int:
        """How often ranks were lost, or have joined."""
        return self.group.generation

    @property
    def alone(self) -> bool:
        """Whether the job has one rank: then nothing is exchanged. Not where it goes on with the work of several."""
        return self.world.world_size == 1 and self._stood_for <= 1

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "used before the rank was claimed"
        self.reconnection.check()
        return self._engine

    @property
    def outdated(self) -> bool:
        return self.deaths.outdated

    @property
    def meet(self) -> Meet:
        """The rendezvous of all ranks of the group."""
        return self.meet_within(self._connects.start_timeout)

    @property
    def _connects(self) -> Config:
        """The settings by which ranks connect: once training has begun, all that wait have one deadline."""
        return replace(self.config, start_timeout=self.config.timeout) if self.generation else self.config

    def meet_within(self, seconds: float) -> Meet:
        group = self.group  # another thread may enter the next one
        has_lost = (lambda: self.deaths.outdated) if self.config.min_np else None
        meet = AllRanks(group, self.control, seconds, has_lost, self.tell_waiting)
        return Apart(meet, f"generation {group.generation}") if group.generation else meet

    @property
    def survives(self) -> bool:
        """Whether training goes on when ranks are lost."""
        return self.config.min_np > 0 and self.deaths.listening

    def tell_waiting(self, what: str, waited: float) -> None:
        """This rank has waited `waited` seconds for others, beside the engine, in doing `what`: all count it as
        waiting, and the user is warned where it takes long."""
        self._stall.tell(what, waited, starts=self.step == 0 and self.generation == 0)

    def connect_anew(self, error: CommError) -> None:
        """Go on with the ranks that are left. Raises the error where no loss explains it."""
        raise error

    @contextmanager
    def as_a_whole(self) -> Iterator[None]:
        """What is done within begins again where ranks are lost meanwhile."""
        outer, self.transaction = self.transaction, perf_counter()
        try:
            yield
        finally:
            self.transaction = outer

    def enter(self, error: Exception, seconds: float = 0.0) -> Generation:
        """Be in the newest group from now on, not connected yet. Raises the error where none comes in time. seconds:
        that a new worker may take to join."""
        late = isinstance(error, StartTimeout) and not self.deaths.outdated
        if not self.survives or isinstance(error, Mismatch) or (late and self.closing):
            raise error
        if not (seconds or self.deaths.outdated) and self._may_have_passed(error):
            self._ask_to_reconnect(error)
        self._await_news(seconds or REGROUP_SECONDS)
        generation = self.deaths.enter(error, 0.0)
        while self.world.joins and self.world.rank not in generation.members:  # it hears of older ones, too
            generation = self.deaths.enter(error, REGROUP_SECONDS)
        if self.world.rank not in generation.members:
            raise PeerLost(f"the others train on without this rank: {generation.text}") from error
        self.members, self.first = generation.members, self.world.rank in generation.firsts
        self.folder_writer = generation.writer(self.world.rank)
        self.group = self.world.among(self.members, generation.number)
        return generation

    def _await_news(self, seconds: float) -> None:
        """Wait until the launcher says who trains on, at most for `seconds`."""
        begun = perf_counter()
        while not self.deaths.await_news(min(PATIENCE, max(0.0, seconds - (perf_counter() - begun)))):
            if (waited := perf_counter() - begun) >= seconds:
                return
            self.tell_waiting("connecting anew", waited)

    def _may_have_passed(self, error: Exception) -> bool:
        """Whether the error says no more than that a connection has failed. Who does not come to the start is not
        waited for twice."""
        ours = isinstance(error, DadtError) and not isinstance(error, CommError | StartTimeout | Unproved)
        wanted = isinstance(error, CommTimeout) and self.config.on_stall == "abort"
        starts = isinstance(error, StartTimeout) and self.step == 0 and self.generation == 0
        return not (ours or wanted or starts)

    def _ask_to_reconnect(self, error: Exception) -> None:
        """Wait until all ranks are to connect again. Raises the error where they are not."""
        assert self.control is not None  # there is an agent that reports losses
        anew, text = self.control.reconnect(str(error), self.config.timeout + REGROUP_SECONDS, self.generation)
        if text:
            raise PeerLost(text) from error
        if not anew:
            if isinstance(error, CommError):
                self.deaths.name(error)
            raise error

    def connect(self) -> Connection:
        """Connect with all ranks, and wait for them. Raises StartTimeout, PeerLost, ConfigError."""
        while True:
            try:
                connection = self._connected()
                break
            except Exception as error:  # noqa: BLE001 (a library may say in words of its own that a rank has ended)
                self.enter(error)
        self._engine, self._disconnect = connection.engine, connection.close
        self._broadcaster, self.device = connection.engine_of("broadcast"), connection.device
        self._abort = connection.abort
        self.deaths.watch(self._abort)
        self.background = Background(connection.engine)
        self._mismatch_is_told, self.mail = connection.told, connection.mail
        self.progress.sends_with(each for each in (connection.engine, connection.device) if each is not None)
        return connection

    def _connected(self) -> Connection:
        if self.group.world_size == 1:
            # Buckets of a device stay there.
            name = "null" if self.device is None else executors_of(self.config)[1].replace("auto", "nccl")
            return executors.connect_one(name, self._connects, self.group, self.meet)
        return executors.connect(self._connects, self.group, self.meet)

    def disconnect(self) -> None:
        """Stop listening to the agent, and end timeline and connection. Waits a few seconds for what is under way."""
        if self.control is not None:
            self.control.stop_listening()
        if self.timeline is not None:
            self.timeline.stop()
        self.hang_up()

    def hang_up(self) -> None:
        """End the connection with the group. Lets go of what failed operations needed, unless a library may still be
        at it."""
        self.deaths.forget(self._abort)
        ended = False
        try:
            self.engine.close(5.0)
        finally:
            try:
                computed = self.background.close()
                disconnect, self._disconnect = self._disconnect, lambda: True
                ended = disconnect() and computed
            finally:
                failed, self._failed = self._failed, []
                if not ended:
                    leak((failed, self.flights.every))
                    self.flights.renew()

    def keep_failed(self, needed: Any) -> None:
        """Keep what a failed operation needs until this connection has ended."""
        self._failed.append(needed)

    def say(self, text: str, level: str = "info") -> None:
        """One line to the user, each text once; rank 0 speaks for all, warnings come from any rank."""
        if text in self._told or (self.group.rank != 0 and level == "info"):
            return
        self._told.add(text)
        if self.control is not None:
            self.control.say(text, level=level)

    # The timeline --------------------------------------------------------------------------------------------

    def record(self, timeline: Timeline, connection: Connection | None) -> None:
        """Begin the timeline, or go on with it on a new connection."""
        if self.timeline is None:
            timeline.start(self._peers(self.config.timeout))
            self.timeline = timeline
        if connection is not None:
            timeline.record(connection, "exchange")

    def merge_timelines(self) -> None:
        """Make one timeline of all ranks'. Every rank calls it."""
        if self.timeline is not None and (text := merge(self.timeline, self._peers(_MERGE_SECONDS), self.members)):
            self.say(text)

    def _peers(self, timeout: float) -> trace.Peers:
        return trace.Alone() if self._engine is None else trace.Through(self._engine, self.group.world_size, timeout)

    # Exchanges -------------------------------------------------------------------------------------------------

    def allgather(
        self, name: str, data: bytes, then: Callable[[Sequence[bytes]], None] = lambda lanes: None
    ) -> Gathering:
        """Begin to give these bytes to all ranks, and to get theirs; does not wait. then: as in Gathering."""
        gathering = Gathering(name, data, self.gathered, then)
        self.gathered += 1
        if self.survives:
            self.gatherings = [*self.gatherings[-KEPT:], gathering]
        gathering.launch(self.engine)
        return gathering

    def tell(self, name: str, data: bytes) -> list[bytes]:
        """Exchange bytes, beside all that training launches. Returns every rank's, by rank of the group."""
        work = self.engine.allgather(data, name)
        self.wait(work)
        return work.lanes

    def collect(self, name: str, value: Any) -> list[Any]:
        """Exchange a value. Returns every rank's, by rank of the group."""
        gathering = self.allgather(name, plain.encode(value, f"what ranks tell each other ({name})"))
        self.wait(gathering)
        return [plain.decode(lane) for lane in gathering.lanes]

    def broadcast(self, tensors: Sequence[torch.Tensor], name: str, root: int = 0) -> None:
        """Overwrite the tensors with the root's."""
        self.reconnection.check()
        sent = [t for t in tensors if t.numel() and t.dtype in DTYPES]
        self._by_host(sent, lambda layout, at, i: self._broadcaster.broadcast(layout, at, root, f"{name} {i}"))

    def average(self, tensors: Sequence[torch.Tensor], name: str, weight: float = 1.0) -> None:
        """Overwrite the tensors with their means over ranks. weight: 0 for a rank whose own do not count; these have to
        be numbers all the same."""
        sent = [t for t in tensors if t.numel()]
        self._by_host(sent, lambda layout, at, i: self.engine.allreduce(layout, at, at, f"{name} {i}", weight))

    def _by_host(self, tensors: Sequence[torch.Tensor], launch: Callable[[Layout, list[int], int], Work]) -> None:
        """Exchange the tensors, or copies of those that are not on the host as they have to be."""
        staged = [(t.data, t.data.to("cpu").contiguous()) for t in tensors]
        works: list[Work] = []
        for i, bucket in enumerate(split([host for _, host in staged], 2**30)):
            works.append(launch(bucket.layout, [t.data_ptr() for t in bucket.tensors], i))
        for work in works:
            self.wait(work)
        for tensor, host in staged:
            if tensor.data_ptr() != host.data_ptr():
                tensor.copy_(host)

    # Waiting ---------------------------------------------------------------------------------------------------

    def keep(self, exchange: InFlight) -> None:
        """Hold the exchange's memory until its works are done, whatever becomes of its owner."""
        self.flights.keep(exchange, self.step)

    def wait(self, work: Work | Averaging | Gathering) -> None:
        """Wait until the work is done. Says for whom it waits, and raises an error that names them."""
        begun = perf_counter()
        stood = not work.done
        while True:
            try:
                work.wait(PATIENCE)
                if stood and self.timeline is not None:
                    self.timeline.waited(work.name, begun)
                return
            except CommError as error:
                self._name_members(error)
                if not isinstance(error, CommTimeout) or self._has_failed:
                    self._stall.overdue(work, perf_counter() - begun, error)
                    if not self.survives:  # else `enter` says so
                        self.deaths.name(error)
                    raise
                self._look(work, perf_counter() - begun, error)

    def await_message(self, message: P2PWork, what: str) -> None:
        """Wait for a message to or from another rank. what: this one does with it. Raises CommError."""
        begun = perf_counter()
        while True:
            try:
                return message.wait(PATIENCE)
            except CommTimeout:
                waited = perf_counter() - begun
                if message.done or waited >= self.config.timeout:
                    raise
                self.tell_waiting(what, waited)

    def _name_members(self, error: CommError) -> None:
        """Raises a Mismatch again that names ranks by their places in the group. Names of operations are quoted."""
        if isinstance(error, Mismatch) and self.group is not self.world:
            text = _NAMED.sub(lambda found: f"rank {self.members[int(found[2])]}" if found[2] else found[1], str(error))
            raise Mismatch(text) from error

    def _look(self, work: Work | Averaging | Gathering, waited: float, timeout: CommTimeout) -> None:
        """Look where the peers are, and warn the user. Raises CommError where waiting on is in vain."""
        launched = self.flights.steps_before(work)
        steps = None if self.closing else self.step if launched is None else launched
        moves = "" if isinstance(work, Gathering) else self.flights.parameters_of(work, self.parameter_names())
        try:
            self._stall.look(work, waited, steps, timeout, moves)
        except CommError:
            self.engine.abort(f"rank {self.world.rank} gave up waiting")
            raise

    @property
    def _has_failed(self) -> bool:
        return self.engine.error is not None or self._broadcaster.error is not None

    def parameter_names(self) -> Mapping[int, str]:
        """The names of parameters as far as they are known, by id."""
        return {}
