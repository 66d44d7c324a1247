"""Connects one rank with all others: records which ranks train, exchanges data with them, and waits for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from dadt._core import Codec as CoreCodec
from dadt._core import Engine, Layout, Work
from dadt.comm import link_totals, plain
from dadt.comm.bucket import DTYPES, split
from dadt.comm.compression import Codec
from dadt.comm.executors.base import Connection, P2PWork, PointToPoint
from dadt.comm.executors.device import Averaging, Device
from dadt.comm.executors.kept import Kept
from dadt.comm.executors.meet import AllRanks, Apart, Equals, Meet
from dadt.comm.executors.point_to_point import NoPointToPoint
from dadt.comm.keepalive import leak
from dadt.comm.peer_deaths import Deaths, Generation
from dadt.comm.trace.recorder import Timeline
from dadt.config import Config
from dadt.control import snapshots
from dadt.control.worker_line import WorkerLine
from dadt.errors import CommError, CommTimeout, Mismatch
from dadt.train.exchange.background import Background
from dadt.train.in_flight import Flights, InFlight
from dadt.train.loss.gathering import Gathering, Gatherings
from dadt.train.loss.reconnection import Reconnection
from dadt.train.progress import Progress
from dadt.train.requests import Requests
from dadt.train.stall import PATIENCE, Stall
from dadt.world import World

_NAMED = re.compile(r'("[^"]*")|\brank (\d+)\b')


class Ranks:
    """One rank among all ranks of the job. Every rank calls the methods that exchange data in the same order, on the
    script's training thread."""

    def __init__(
        self,
        world: World,
        config: Config,
        control: WorkerLine | None,
        together: Callable[[], bool],
        parameter_names: Callable[[], Mapping[int, str]],
        connect_anew: Callable[[CommError], None],
    ) -> None:
        """together: function that returns whether the algorithm lets all ranks take the same steps. parameter_names:
        function that returns the known names of parameters, by id. connect_anew: function that connects with the
        remaining ranks after an error, or raises the error if no loss of ranks explains it."""
        self.world = world
        """Numbers of this rank (rank, local rank and so on) among the ranks with which the job began."""
        self.members: Sequence[int] = world.equals
        """The ranks that exchange data with this rank now, including itself, in the order of the group."""
        self.group = world.among(self.members, 0)
        """Numbers of this rank among `members`, which are the ranks that train now or, if the script divides ranks into
        islands, its counterparts in the other islands."""
        self.first = world.local_rank == 0 and not world.joins
        """Whether this rank is the first on its host, so that the files that it writes are kept."""
        self.newest = Generation(members=tuple(range(world.world_size)))
        """All ranks of the job that train now, also those that exchange no data with this rank."""
        # The rank that writes into this rank's working folder if several hosts share the folder, otherwise -1.
        self.folder_writer = world.folder_writer
        self.shares = world.world_size
        """Number of parts into which data is divided: the number of ranks with which the job began, or, in a resumed
        job, with which the first job began."""
        self.config = config
        self.control = control
        self.progress = Progress()
        self.requests = Requests()
        self.deaths = Deaths()
        self.kept = Kept(self.members)
        self.timeline: Timeline | None = None
        self.connection: Connection | None = None
        """The newest connection with the other ranks, which may have failed or ended; None before the first."""
        self.mail: PointToPoint = NoPointToPoint()
        """Sends and receives messages between pairs of ranks."""
        self.background: Background
        """Thread for computations between two operations of the C++ engine."""
        # object that averages tensors in GPU memory; None if tensors are averaged in host memory
        self.device: Device | None = None
        self.parted = False
        """Whether ranks have taken steps with gradients that were not averaged."""
        self.flights = Flights()
        self.gatherings = Gatherings()
        self.transaction: float | None = None
        """Time (perf_counter) at which the current `as_a_whole` block began, which is repeated if ranks are lost; None
        outside of such a block."""
        self.closing = False
        """Whether this rank has begun to end its training; all other ranks are expected to end, too."""
        self.reconnection = Reconnection(self.deaths, connect_anew, config.timeout + config.start_timeout)
        self._connect_anew = connect_anew
        self._stood_for = snapshots.shares(Path(config.resume)) if config.resume else 1
        self._steps_together = together
        self._parameter_names = parameter_names
        self._disconnect: Callable[[], bool] = lambda: True
        self._failed: list[Any] = []  # memory that failed operations may still use
        self._said: set[str] = set()
        self._stall = Stall(config, world.rank, control, partial(self.say, level="warning"))

    def resign(self) -> None:
        """Stop acting as a rank of the job, in a forked child process."""
        self.world = World()
        self.control = self.timeline = None
        self.closing = True

    @property
    def step(self) -> int:
        """Number of optimizer steps that this rank has taken, counting all optimizers."""
        return self.progress.step

    @property
    def generation(self) -> int:
        """Number of times that ranks were lost or have joined."""
        return self.group.generation

    @property
    def alone(self) -> bool:
        """Whether the job has one rank and exchanges nothing. False if one rank continues the work of several."""
        return self.world.world_size in (1, self.world.island_size) and self._stood_for <= 1

    @cached_property
    def together(self) -> bool:
        """Whether all ranks take the same steps, and not each at its own speed without waiting for peers."""
        return self.alone or self._steps_together()

    @property
    def survives(self) -> bool:
        """Whether training continues when ranks are lost."""
        return self.config.min_np > 0 and self.deaths.listening

    def say(self, text: str, level: str = "info") -> None:
        """Print a line for the user, unless the same text was printed before. Information is printed by rank 0 only,
        warnings by any rank."""
        if text in self._said or (self.world.rank != self._speaker and level == "info"):
            return
        self._said.add(text)
        if self.control is not None:
            self.control.say(text, level=level)

    @property
    def _speaker(self) -> int:
        """The rank that prints information which all ranks have: the first of those that train."""
        return self.members[0] - self.members[0] % self.world.parts

    # Connection with the other ranks ---------------------------------------------------------------------------

    @property
    def meet(self) -> Meet:
        """The rendezvous at which all ranks of the group find each other."""
        return self.meet_within(self.connecting.start_timeout)

    @property
    def connecting(self) -> Config:
        """The settings for connecting. After ranks were lost or have joined, connecting has the same deadline as any
        other wait."""
        return replace(self.config, start_timeout=self.config.timeout) if self.generation else self.config

    def meet_within(self, seconds: float) -> Meet:
        group = self.group  # read once, as another thread may enter the next group
        has_lost = (lambda: self.deaths.outdated) if self.config.min_np else None
        meet: Meet = AllRanks(group, self.control, seconds, has_lost, self.tell_waiting, self.kept.group)
        if self.world.parts > 1:
            meet = Equals(meet, self.members, group.rank)
        return Apart(meet, f"generation {group.generation}") if group.generation else meet

    def use(self, connection: Connection) -> None:
        """Use this connection for all exchanges from now on."""
        self.connection, self._disconnect = connection, connection.close
        self.mail, self.device = connection.mail, connection.device
        self.deaths.watch(connection.abort)
        self.background = Background(connection.engine)
        self.progress.links.begin("exchange", link_totals.renumbered(connection.links, self.members))
        self.progress.sends_with(each for each in (connection.engine, connection.device) if each is not None)

    @property
    def engine(self) -> Engine:
        assert self.connection is not None, "used before the rank was claimed"
        self.reconnection.check()
        return self.connection.engine

    @property
    def mismatch_is_told(self) -> bool:
        """Whether ranks that are in different operations get an error that names the mismatch."""
        return self.connection is not None and self.connection.told

    def disconnect(self) -> None:
        """Stop listening to the agent, and end timeline and connection, once operations under way end or time out."""
        if self.control is not None:
            self.control.stop_listening()
        if self.timeline is not None:
            self.timeline.stop()
        self.kept.end()
        self.hang_up()

    def hang_up(self) -> None:
        """End the connection with the group, and free the memory of failed operations unless a library may still use
        it."""
        if self.connection is not None:
            self.deaths.forget(self.connection.abort)
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
        """Keep the memory of a failed operation alive until this connection has ended."""
        self._failed.append(needed)

    # Ranks that are lost ---------------------------------------------------------------------------------------

    @contextmanager
    def as_a_whole(self) -> Iterator[None]:
        """Context for a block that is repeated as a whole if ranks are lost meanwhile."""
        outer, self.transaction = self.transaction, perf_counter()
        try:
            with nullcontext() if self.together else self.reconnection.within():
                yield
        finally:
            self.transaction = outer

    def enter(self, generation: Generation) -> None:
        """Set this rank's members and numbers to those of a new generation of ranks (the ranks that train after a
        loss), without connecting yet."""
        self.members = [rank for rank in generation.members if rank in self.world.equals]
        self.kept.enter(self.members)
        self.newest, self.first = generation, self.world.rank in generation.firsts
        self.folder_writer = generation.writer(self.world.rank)
        self.group = self.world.among(self.members, generation.number)

    def regroup(self, error: CommError) -> None:
        """Connect again with the remaining ranks, after ranks were lost or a connection has failed. Raises the error if
        it has another cause, or if training cannot continue."""
        if self.together or not self.survives:
            self._connect_anew(error)
        else:
            self.reconnection.wait(error)

    # Collective operations of all ranks ------------------------------------------------------------------------

    def allgather(
        self, name: str, data: bytes, then: Callable[[Sequence[bytes]], None] = lambda lanes: None
    ) -> Gathering:
        """Begin to send these bytes to all ranks and to receive theirs, without waiting. then: callback that gets all
        ranks' bytes when they have arrived."""
        gathering = self.gatherings.begin(name, data, perf_counter(), then, kept=self.survives)
        gathering.launch(self.engine)
        return gathering

    def gather_from_all(self, name: str, data: bytes) -> Gathering:
        """Gather bytes from all ranks of the job, also from ranks that store other parts of the model. If there are
        such ranks, the call waits for all ranks."""
        if self.world.parts == 1:
            return self.allgather(name, data)
        gathering = Gathering(name, data, self.gatherings.count, perf_counter(), lambda lanes: None)
        world = replace(self.world, generation=self.generation)
        meet = AllRanks(world, self.control, self.config.timeout, None, self.tell_waiting)
        gathering.settle(meet.exchange(f"{name} at step {self.step}", data))
        return gathering

    def tell(self, name: str, data: bytes) -> list[bytes]:
        """Send these bytes to all ranks and wait for theirs. Returns each rank's bytes, in the order of the group."""
        work = self.engine.allgather(data, name)
        self.wait(work)
        return work.lanes

    def collect(self, name: str, value: Any) -> list[Any]:
        """Send a plain value to all ranks and wait for theirs. Returns each rank's value, in the order of the group."""
        gathering = self.allgather(name, plain.encode(value, f"what ranks tell each other ({name})"))
        self.wait(gathering)
        return [plain.decode(lane) for lane in gathering.lanes]

    def broadcast(self, tensors: Sequence[torch.Tensor], name: str, root: int = 0) -> None:
        """Overwrite the tensors with those of the rank `root`."""
        self.reconnection.check()
        assert self.connection is not None
        engine = self.connection.engine_of("broadcast")
        sent = [t for t in tensors if t.numel() and t.dtype in DTYPES]
        self._by_host(sent, lambda layout, at, i: engine.broadcast(layout, at, root, f"{name} {i}"))

    def average(
        self, tensors: Sequence[torch.Tensor], name: str, weight: float = 1.0, codec: Codec | None = None
    ) -> None:
        """Overwrite the tensors with their means over ranks. weight: weight of this rank's values in the mean; 0 if
        they do not count, but even then the values must be finite. codec: the compression of the values; None for no
        compression."""
        mean = partial(self.engine.allreduce, codec=CoreCodec.none if codec is None else codec.core)
        sent = [t for t in tensors if t.numel()]
        self._by_host(sent, lambda layout, at, i: mean(layout, at, at, f"{name} {i}", weight))

    def _by_host(self, tensors: Sequence[torch.Tensor], launch: Callable[[Layout, list[int], int], Work]) -> None:
        """Exchange the tensors from host memory. Contiguous host copies are exchanged in place of tensors that are on a
        GPU or not contiguous."""
        staged = [(t.data, t.data.to("cpu").contiguous()) for t in tensors]
        buckets = enumerate(split([host for _, host in staged], 2**30))
        for work in [launch(each.layout, [t.data_ptr() for t in each.tensors], i) for i, each in buckets]:
            self.wait(work)
        for tensor, host in staged:
            if tensor.data_ptr() != host.data_ptr():
                tensor.copy_(host)

    # Waiting for operations ------------------------------------------------------------------------------------

    def keep(self, exchange: InFlight) -> None:
        """Keep the exchange's memory alive until its operations are done, even if no other code refers to it."""
        self.flights.keep(exchange, self.step)

    def tell_waiting(self, what: str, waited: float) -> None:
        """Report that this rank has waited `waited` seconds for other ranks while it did `what`, for a wait outside the
        C++ engine. The user is warned if the wait takes long."""
        self._stall.tell(what, waited, starts=self.step == 0 and self.generation == 0)

    def wait(self, work: Work | Averaging | Gathering) -> None:
        """Wait until the work is done, and report long waits. Raises CommError with the names of the ranks that are
        missing."""
        while True:
            try:
                return self._await(work)
            except CommError as error:
                if not isinstance(work, Gathering) or self.transaction is not None or self.closing:
                    raise
                self.regroup(error)  # after regrouping, another rank sends the result, or the allgather begins again

    def _await(self, work: Work | Averaging | Gathering) -> None:
        begun, stood = perf_counter(), not work.done
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
                    if not self.survives:  # in jobs that survive a loss, Recovery names the ended rank
                        self.deaths.name(error)
                    raise
                self._look(work, perf_counter() - begun, error)

    @property
    def _has_failed(self) -> bool:
        self.reconnection.check()
        return self.connection is not None and self.connection.failed

    def await_message(self, message: P2PWork, what: str) -> None:
        """Wait for a message to or from another rank. what: purpose of the message, for reports. Raises CommError."""
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
        """If the error is a Mismatch, raise it again with a message that names ranks by their numbers in the whole job,
        not by their indices in the group. Quoted names of operations stay unchanged."""
        if isinstance(error, Mismatch) and self.group is not self.world:
            text = _NAMED.sub(lambda found: f"rank {self.members[int(found[2])]}" if found[2] else found[1], str(error))
            raise Mismatch(text) from error

    def _look(self, work: Work | Averaging | Gathering, waited: float, timeout: CommTimeout) -> None:
        """During a long wait, find out in which step the other ranks are, and warn the user. Raises CommError if
        waiting longer is useless."""
        before = self.flights.steps_before(work)
        steps = self.step if before is None else before

        def launched(peer: Mapping[str, Any]) -> bool:
            if isinstance(work, Gathering):
                return bool(peer["gathered"] > work.number)
            return self.closing or peer["step"] > steps

        moves = "" if isinstance(work, Gathering) else self.flights.parameters_of(work, self._parameter_names())
        try:
            self._stall.look(work, waited, launched, timeout, moves)
        except CommError:
            self.engine.abort(f"rank {self.world.rank} gave up waiting")
            raise
