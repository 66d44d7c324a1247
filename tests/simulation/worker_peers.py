"""One rank among the others: its operations with them, and how it connects with them, first and anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dadt import errors
from dadt.comm.executors.meet import PATIENCE
from dadt.comm.peer_deaths import NAME_SECONDS, Deaths, Generation
from dadt.control.frame import Frame
from dadt.control.worker_line import parts
from dadt.errors import CommError, CommTimeout, DadtError, Mismatch, PeerLost, StartTimeout, Unproved
from dadt.train.loss.recovery import REGROUP_SECONDS
from simulation.data import Connection, Work
from simulation.worker_script import Interrupted
from simulation.worker_thread import Steps, Thread, Wait

if TYPE_CHECKING:
    from simulation.worker import Worker

LIBRARY = "Gloo connectFullMesh failed: timed out"
"""What a library says that connects ranks where it waits in vain."""


class WorkerPeers:
    """What one rank knows of the others, and does with them."""

    def __init__(self, worker: Worker, *, joins: bool) -> None:
        self._worker, self.world, self.config = worker, worker.world, worker.config
        self._joins = self.is_new = joins
        self.deaths = Deaths()
        self._parts = worker.agent.job.island_size or 1
        self.place = worker.rank % self._parts
        """Its place in its island."""
        self._equals = range(self.place, worker.agent.job.size, self._parts)
        self.members: Sequence[int] = self._equals
        """The ranks that exchange data with this one: with islands those at the same place in theirs."""
        self.generation = 0
        self.connection: Connection | None = None
        self.connected = self.trained = False
        """Whether it has been connected with all others once, and whether it needs them no more."""
        self.survives = self.config.min_np > 0
        self.together = self.config.algorithm != "gossip"
        self.first = worker.rank % worker.agent.job.per_host == 0 and not joins
        """Whether its files are the ones to keep on its host."""
        self.interrupts_agreed = False
        """Whether all ranks know that one of them was told to interrupt its script."""
        self.mismatch_is_told = self.config.executor in ("shm", "tcp")
        """Whether ranks that are in different operations get an error that names the mismatch."""
        self._told_of = ""
        self.news: list[Wait] = []
        self._regrouping = False
        self._background: Thread | None = None
        self._error: BaseException | None = None
        """What has ended the background's thread."""
        self._count = 0
        self._within: int | None = None

    def hear(self, frame: Frame) -> None:
        """The agent tells of a loss."""
        regroups = frame.kind == "regroup"
        if regroups:
            self.deaths.regroup(
                Generation(
                    frame["generation"],
                    tuple(frame["members"]),
                    tuple(frame["firsts"]),
                    frame["text"],
                    frame["handed"],
                )
            )
            self._worker.approaches.forget()
        elif (steps := frame.get("steps")) is None:
            self.deaths.tell(frame["text"])
        elif self._worker.trains:
            self.deaths.tell_left(frame["text"], steps, self._step)
        self._wake_all()
        if regroups and not self.together and self.connected:
            self._reconnect(None)

    def _wake_all(self) -> None:
        news, self.news = self.news, []
        for wait in news:
            wait.give()

    def _await_news(self, seconds: float) -> Steps:
        if not self.deaths.await_news(0):
            yield self._worker.sleep(max(0.0, seconds), self.news)
        return self.deaths.await_news(0)

    def await_newer(self, number: int, seconds: float) -> Steps:
        """What Deaths.await_newer does."""
        until = self.world.now + seconds
        while self.deaths.await_newer(number, 0.0) == number and self.world.now < until - 1e-9:
            yield self._worker.sleep(until - self.world.now, self.news)
        return self.deaths.await_newer(number, 0.0)

    @property
    def _step(self) -> int:
        return max(0, self._worker.step)

    # Operations --------------------------------------------------------------------------------------------------

    def call(self, name: str, value: Any) -> Steps:
        """One operation of the engine, with what Peers.wait does about it."""
        self._check_background()
        return (yield from self.wait(self.begin_operation(name, value), name))

    def begin_operation(self, name: str, value: Any, gathering: int | None = None) -> Work:
        """Begin an operation of the engine, which another thread carries out."""
        work = Work(gathering)
        if self.connection is None:
            work.end([value])
        else:
            self.connection.begin(self._worker.rank, name, value, work.end)
        return work

    def wait(self, work: Work, name: str) -> Steps:
        """What Ranks.wait does: wait for an operation, and look after the others if that takes long."""
        begun = self.world.now
        while not work.done:
            yield self._worker.sleep(PATIENCE, work.waiting)
            if not work.done:
                yield from self._look(work, name, self.world.now - begun)
        if work.error is not None:
            if not self.survives:
                yield from self._name(work.error)
            raise work.error
        return work.lanes

    def _name(self, error: CommError) -> Steps:
        """What Deaths.name does: say which rank has ended, where that is known in a moment."""
        if isinstance(error, CommTimeout | Mismatch) or str(error) == self.deaths.text:
            return
        if (yield from self._await_news(NAME_SECONDS)):
            self.deaths.check()

    def _look(self, work: Work, name: str, waited: float) -> Steps:
        """What Ranks._look and Stall.look do."""
        worker = self._worker

        def launched(peer: dict[str, Any]) -> bool:
            if work.gathering is not None:
                return bool(peer["gathered"] > work.gathering)
            return worker.closing or peer["step"] > self._step

        answer = yield from worker.ask("peers", generation=self.generation)
        if work.done:
            return
        peers = [each for each in answer["peers"] if each["rank"] != worker.rank]
        who = ", ".join(f"rank {each['rank']} {each['state']}" for each in peers)
        try:
            if not all(launched(each) for each in peers if each["said"].startswith("has ended")):
                raise Mismatch(f"rank {worker.rank} is in {name}, {who}: the ranks do not run the same steps")
            if waited > self.config.timeout:
                raise CommTimeout(f"waited {waited:.0f} s in {name}: {who}")
            if waited > self.config.stall_warning and self._told_of != f"{self.generation} {name}":
                self._told_of = f"{self.generation} {name}"
                text = f"rank {worker.rank} waits in {name}: {who}"
                if self.config.on_stall == "abort":
                    raise CommTimeout(f"{text}; waited {self.config.stall_warning:g} s (--on-stall abort)")
                worker.report("say", text=text, level="warning")
                if self.config.on_stall == "dump":
                    worker.report("dump")
        except CommError as error:
            self.abort(error)
            raise

    @property
    def connection_failed(self) -> bool:
        return self.connection is not None and self.connection.failed(self._worker.rank)

    def _tell_waiting(self) -> Steps:
        yield from self._worker.ask("peers", starts=self._step == 0 and self.generation == 0)

    def abort(self, error: CommError) -> None:
        if self.connection is not None:
            self.connection.abort(self._worker.rank, error)

    def leave(self, *, silent: bool = False, gentle: bool = False) -> None:
        """Connection.leave, if there is one."""
        if self.connection is not None:
            self.connection.leave(self._worker.rank, silent=silent, gentle=gentle)

    def meet(self, key: str, blob: bytes, timeout: float) -> Steps:
        apart = f"generation {self.generation} " if self.generation else ""
        if self._parts > 1:  # what Equals.exchange does
            keys = [f"{apart}{key}/of rank {rank}" for rank in self.members]
            ours = keys[self.members.index(self._worker.rank)]
            yield from self._worker.ask("put", 0.0, blob, key=ours, generation=self.generation)
            return parts((yield from self._worker.ask("get", timeout, keys=keys, generation=self.generation)))
        if len(self.members) == 1:
            return [blob]
        facts = {"key": apart + key, "generation": self.generation}
        return parts((yield from self._worker.ask("exchange", timeout, blob, **facts)))

    # Connecting --------------------------------------------------------------------------------------------------

    def begin(self) -> Steps:
        """Connect with the others for the first time, as a new worker once it is let in."""
        if self._joins:
            seconds = self.config.start_timeout if self._parts > 1 else 0.0
            yield from self._enter(StartTimeout("the launcher did not let this rank into the job"), seconds)
        yield from self._connect()
        if self.generation:
            with self.within():
                try:
                    yield from self._worker.training.regroup()
                except CommError as error:
                    yield from self.again(error)

    def _connect(self) -> Steps:
        """What Peers.connect does."""
        while True:
            try:
                connection = yield from self._connected()
                break
            except (CommError, StartTimeout, DadtError) as error:
                yield from self._enter(error)
        self.connected = True
        self.deaths.watch(lambda reason, lost: self._worker.process.get(lambda: self._lost(connection, reason)))

    def _lost(self, connection: Connection, reason: str) -> None:
        connection.abort(self._worker.rank, PeerLost(reason))

    def _connected(self) -> Steps:
        config, worker = self.config, self._worker
        timeout = config.timeout if self.generation else config.start_timeout
        me = f"{worker.rank}:{worker.pid}".encode()
        met = yield from self.meet("connect", me, timeout)
        connection = self.connection = worker.agent.job.connections.join(worker, self.generation, met)
        if len(met) == 1:
            return connection
        # A library that waits for the others within its own deadline, in a thread that is left behind.
        looked = begun = self.world.now
        work = self.begin_operation("connecting", None)
        while not work.done:
            yield worker.sleep(0.5, work.waiting, self.news)
            if work.done:
                break
            if self.survives and self.deaths.outdated:
                raise PeerLost("ranks have ended")
            if self.world.now - begun > timeout:
                raise DadtError(LIBRARY)
            if self.world.now - looked >= PATIENCE:
                looked = self.world.now
                yield from self._tell_waiting()
        if work.error is not None:
            raise work.error
        return connection

    def _enter(self, error: Exception, seconds: float = 0.0) -> Steps:
        """What Recovery.enter does."""
        worker = self._worker
        late = isinstance(error, StartTimeout) and not self.deaths.outdated
        if not self.survives or isinstance(error, Mismatch) or (late and worker.closing):
            raise error
        if seconds:
            yield from self._await_generation(seconds)
        if not self.deaths.outdated and self._may_have_passed(error):
            answer = yield from worker.ask(
                "reconnect", self.config.timeout + REGROUP_SECONDS, text=str(error), generation=self.generation
            )
            if answer["text"]:
                raise PeerLost(answer["text"]) from error
            if not answer["anew"]:
                if isinstance(error, CommError):
                    yield from self._name(error)
                raise error
        yield from self._await_generation(REGROUP_SECONDS)
        generation = self.deaths.enter(error, 0.0)
        while self._joins and worker.rank not in generation.members:
            yield from self._await_generation(max(seconds, REGROUP_SECONDS))
            generation = self.deaths.enter(error, 0.0)
        if worker.rank not in generation.members:
            raise PeerLost(f"the others train on without this rank: {generation.text}") from error
        self.members = [rank for rank in generation.members if rank in self._equals]
        self.generation = generation.number
        self.first = worker.rank in generation.firsts
        self._joins = False
        return generation

    def _await_generation(self, seconds: float) -> Steps:
        begun = self.world.now
        while not (yield from self._await_news(min(PATIENCE, seconds - (self.world.now - begun)))):
            if self.world.now - begun >= seconds - 1e-9:
                return
            yield from self._tell_waiting()

    def _may_have_passed(self, error: Exception) -> bool:
        ours = type(error) in (errors.ConfigError, errors.NotResumed)
        ours = ours or (isinstance(error, DadtError) and not isinstance(error, CommError | StartTimeout | Unproved)
                        and str(error) != LIBRARY)  # fmt: skip
        wanted = isinstance(error, CommTimeout) and self.config.on_stall == "abort"
        starts = isinstance(error, StartTimeout) and self._step == 0 and self.generation == 0
        return not (ours or wanted or starts)

    def connect_anew(self, error: CommError, seconds: float = 0.0) -> Steps:
        """What Recovery.connect_anew does. seconds: how long a new worker may take to join."""
        if self._regrouping:
            raise error
        self._regrouping = True
        begun = self.world.now
        try:
            while True:
                before = self.generation
                generation: Generation = yield from self._enter(error, seconds)
                seconds = 0.0
                if self.together and generation.handed > before:
                    self._worker.training.release()
                try:
                    self.abort(CommError("hung up"))
                    yield from self._connect()
                    yield from self._worker.training.regroup()
                    break
                except CommError as another:
                    error = another
        finally:
            self._regrouping = False
        worker, seconds = self._worker, self.world.now - begun
        worker.snapshots.drop()
        worker.handover.regrouped()
        worker.approaches.begin_anew()
        size, first = len(self.members) * self._parts, self.members[0] - self.members[0] % self._parts
        text = f"{size} workers train on from step {worker.step}, {seconds:.2f} s later"
        if worker.rank == first:
            worker.report("say", text=text, level="info")

    def again(self, error: CommError) -> Steps:
        """What Departure.regroup does."""
        if self.together or not self.survives:
            yield from self.connect_anew(error)
        else:
            yield from self._await_reconnection(error)

    # Where nobody waits: a thread of its own connects anew ---------------------------------------------------------

    @contextmanager
    def within(self) -> Iterator[None]:
        """What the training thread does with all ranks (Reconnection.within)."""
        outer, self._within = self._within, self._count
        try:
            yield
        finally:
            self._within = outer

    def _reconnect(self, failure: CommError | None) -> None:
        """What Reconnection.begin does."""
        if self._background is None and (failure is not None or self.deaths.outdated) and not self.trained:
            self._background = Thread(self._worker, self._run(failure), lambda error: None)
            self._background.go_on()

    def _run(self, failure: CommError | None) -> Steps:
        done = False
        while not done:
            error, failure = failure or PeerLost("ranks have ended"), None
            try:
                yield from self.connect_anew(error)
                self._count += 1
            except (DadtError, Interrupted) as found:
                self._error = found
            done = self._error is not None or not self.deaths.outdated
        self._background = None
        self._wake_all()

    def check(self) -> None:
        """Raise what the background's thread has found, or what is known of losses."""
        self._check_background()
        self.deaths.check()

    def _check_background(self) -> None:
        """What Reconnection.check does. In the background's thread it concerns nobody."""
        if self.together or self._worker.current is self._background:
            return
        if self._error is not None:
            raise self._error
        outdated = self._background is not None or self._within != self._count
        if self._within is not None and outdated:
            raise PeerLost("ranks have ended")

    def _await_reconnection(self, error: CommError) -> Steps:
        """What Reconnection.wait does."""
        before = self._within
        if self._count == before:
            self._reconnect(error)
        deadline = self.world.now + self.config.timeout + self.config.start_timeout
        while self._background is not None and self.world.now < deadline:
            yield self._worker.sleep(1.0, self.news)
        if self._error is not None:
            raise self._error
        if self._background is not None or self._count == before:
            raise error
        self._within = self._count
