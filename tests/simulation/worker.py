"""A worker: a small model of training, with the control frames, deadlines and order of dadt/train."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from signal import SIGINT, SIGKILL, SIGTERM, SIGUSR2
from typing import TYPE_CHECKING, Any

from dadt import errors
from dadt.comm.peer_deaths import Deaths, Generation
from dadt.config import Config
from dadt.control.frame import Frame
from dadt.errors import CommError, CommTimeout, DadtError, Mismatch, PeerLost, StartTimeout, Unproved
from simulation.data import Connection, mixed
from simulation.world import Process, World

if TYPE_CHECKING:
    from simulation.agent import Agent

PATIENCE = 3.0
"""Seconds of waiting after which a rank looks where its peers are (dadt/comm/executors/meet.py)."""
REGROUP_SECONDS = 10.0
NAME_SECONDS = 2.0
ANSWER_SECONDS = 10.0
REPORT_SECONDS = 0.2
LEAST_SECONDS = 1.0
LINE_SECONDS = 0.0003
"""What a frame takes between a worker and its agent."""
UNCAUGHT = 1
STACKS = "/tmp/dadt/job/stacks-"
"""Where workers write their stacks."""
LIBRARY = "Gloo connectFullMesh failed: timed out"
"""What a library says that connects ranks where it waits in vain."""

Steps = Generator[Callable[["Wait"], None], Any, Any]
"""What a thread does: it yields what it waits for, and gets what that gives."""


class ScriptError(Exception):
    """The script's own exception."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, as the script gets it."""


class Exit(Exception):
    """The script calls `sys.exit`, or its process ends by itself."""

    def __init__(self, code: int, *, at_once: bool) -> None:
        super().__init__(code)
        self.code, self.at_once = code, at_once


class Late(Exception):
    """What is waited for is not there yet."""


@dataclass(frozen=True, slots=True)
class Script:
    """What the ranks of a job run."""

    steps: int
    step_seconds: float
    start_seconds: float
    on_interrupt: str
    """What it does on Ctrl-C: end, save, or ignore."""
    on_terminate: str
    """What it does on SIGTERM: end, save, or ignore."""
    save_seconds: float
    ends_when_saved: bool


class Wait:
    """One wait of a thread, which ends once."""

    __slots__ = ("number", "thread")

    def __init__(self, thread: Thread, number: int) -> None:
        self.thread, self.number = thread, number

    def give(self, value: Any = None) -> None:
        """End it with a value, or an error that is raised."""
        if self.thread.waits == self.number:
            self.thread.worker.process.get(lambda: self._end(value))

    def _end(self, value: Any) -> None:
        if self.thread.waits == self.number:
            self.thread.go_on(value)


class Thread:
    """One thread of a worker."""

    def __init__(self, worker: Worker, steps: Steps, end: Callable[[BaseException | None], None]) -> None:
        """end: called once it has ended, with what was not caught."""
        self.worker, self._steps, self._end = worker, steps, end
        self.waits = 0
        self.over = False

    def go_on(self, value: Any = None) -> None:
        if self.over:
            return
        self.waits += 1
        outer, self.worker.current = self.worker.current, self
        try:
            raises = isinstance(value, BaseException)
            what = self._steps.throw(value) if raises else self._steps.send(value)
        except StopIteration:
            self.over = True
            self._end(None)
        except (DadtError, ScriptError, Interrupted, Exit) as error:
            self.over = True
            self._end(error)
        else:
            what(Wait(self, self.waits))
        finally:
            self.worker.current = outer


class Worker:
    """One process of a rank, from its start to its end."""

    def __init__(
        self, world: World, agent: Agent, rank: int, pid: int, script: Script, config: Config, *, joins: bool
    ) -> None:
        self.world, self.agent, self.rank, self.pid, self.script, self.config = world, agent, rank, pid, script, config
        self.joins, self.born = joins, world.now
        self.host = agent.machine
        self.process = Process(world, f"rank {rank}")
        self.deaths = Deaths()
        self.listens = False
        self.went_on = float("-inf")
        """When it has last gone on after a stop."""
        self.handles = False
        """Whether the script has a handler for the signal by which it saves."""
        self.doom: Exception | None = None
        """What the script raises in its next step."""
        self.pause = 0.0
        """Seconds that its next step takes more."""
        self.step = self.averaged = -1
        self.weights = 0
        self.members: Sequence[int] = range(agent.job.size)
        self.generation = 0
        self.connection: Connection | None = None
        self.connected = False
        """Whether it has been connected with all others once."""
        self.closing = self.trained = False
        self.preempted = self.apart = self.interrupted = False
        self.saves_heard = self.saves_raised = self.interrupts_heard = 0
        self._saves_done = self._saves_agreed = 0
        self._reported = float("-inf")
        self._told_of: str = ""
        self._said: set[str] = set()
        self._news: list[Wait] = []
        self._survives = config.min_np > 0
        self.together = config.algorithm != "gossip"
        self._regrouping = False
        self.current: Thread | None = None
        self._background: Thread | None = None
        self._error: BaseException | None = None
        """What has ended the background's thread."""
        self._count = 0
        self._within: int | None = None
        self._main = Thread(self, self._life(), self._ended)
        self.process.after(0.0, self._main.go_on)

    # Waiting -----------------------------------------------------------------------------------------------------

    def _sleep(self, seconds: float) -> Callable[[Wait], None]:
        return lambda wait: self._wake(seconds, wait)

    def _wake(self, seconds: float, wait: Wait) -> None:
        self.world.after(seconds, wait.give)

    def _ask(self, kind: str, timeout: float = 0.0, body: bytes = b"", **header: Any) -> Steps:
        facts = {"rank": self.rank, "pid": self.pid, "timeout": timeout, **header}

        def ask(wait: Wait) -> None:
            self.agent.line(self, Frame(kind, facts, body), lambda frame: self.world.after(
                LINE_SECONDS, lambda: wait.give(frame)))  # fmt: skip
            self.world.after(timeout + ANSWER_SECONDS, lambda: wait.give(Late()))

        try:
            answer = yield ask
        except Late:
            raise DadtError(f"the agent of this host did not answer to {kind}") from None
        if answer.kind == "error":
            raise getattr(errors, answer["type"])(answer["message"])
        return answer

    def report(self, kind: str, body: bytes = b"", **header: Any) -> None:
        self.agent.line(self, Frame(kind, {"rank": self.rank, "pid": self.pid, **header}, body), None)

    def _await_news(self, seconds: float) -> Steps:
        if not self.deaths.await_news(0):

            def wait(each: Wait) -> None:
                self._news.append(each)
                self._wake(max(0.0, seconds), each)

            yield wait
        return self.deaths.await_news(0)

    def hear(self, frame: Frame) -> None:
        """What the thread that listens to the agent does (Runtime._hear)."""
        if frame.kind == "preempted":
            self.preempted = True
        elif frame.kind == "interrupt":
            if not self.closing and not self.interrupts_heard:
                self.interrupts_heard = 1
                together = self.together and self.averaged >= 0
                patience = frame["patience"] if together else 0.0
                self.process.after(patience, lambda: self._interrupt_late(patience))
        elif frame.kind == "save":
            patience = frame["patience"] if self.together else 0.0
            self.saves_heard += 1
            count = self.saves_heard
            self.process.after(patience, lambda: self._save_late(count))
        elif frame.kind == "regroup":
            self.deaths.regroup(
                Generation(frame["generation"], tuple(frame["members"]), tuple(frame["firsts"]), frame["text"])
            )
            self._wake_all()
            if not self.together and self.connected:
                self._reconnect(None)
        elif frame.kind == "death":
            if (steps := frame.get("steps")) is None:
                self.deaths.tell(frame["text"])
            elif self.averaged >= 0:
                self.deaths.tell_left(frame["text"], steps, max(0, self.step))
            self._wake_all()

    def _wake_all(self) -> None:
        news, self._news = self._news, []
        for wait in news:
            wait.give()

    def _interrupt_late(self, patience: float) -> None:
        if not self.interrupted:
            self.apart = True
            if self.script.on_interrupt != "ignore":
                self.process.after(max(patience, LEAST_SECONDS), self._abort_interrupted)
            self._interrupt()

    def _abort_interrupted(self) -> None:
        if self.connection is not None:
            self.connection.abort(self.rank, CommError("interrupted"))

    def _interrupt(self) -> None:
        if not self.interrupted:
            self.interrupted = True
            if self.script.on_interrupt != "ignore":
                self._main.go_on(Interrupted())

    def _save_late(self, count: int) -> None:
        if self.saves_raised < count:
            self.saves_raised = count

    # The process -------------------------------------------------------------------------------------------------

    def signal(self, number: int) -> None:
        if not self.process.alive:
            return
        if number == SIGKILL:
            self.die(-SIGKILL)
        elif number == SIGTERM:
            self.process.get(self._terminate)
        elif number == SIGINT:
            self.process.get(self._interrupt)
        else:
            self.process.get(lambda: self._saved_by_signal(number))

    def _saved_by_signal(self, number: int) -> None:
        if number != self.agent.job.checkpoint_signal or not self.handles:
            self.die(-number)
        else:
            self.saves_heard += 1
            self.saves_raised = self.saves_heard

    def _terminate(self) -> None:
        if self.script.on_terminate == "end":
            self.die(-SIGTERM)
        elif self.script.on_terminate == "save":
            self.process.after(self.script.save_seconds, lambda: self.die(0))

    def die(self, code: int, *, silent: bool = False) -> None:
        """The process ends. silent: with its machine."""
        if self.process.alive:
            self.process.alive = False
            self._main.over = True
            self.world.note(self.process.name, f"ends with code {code}")
            if self.connection is not None:
                self.connection.leave(self.rank, silent=silent)
            if not silent:
                self.agent.process.after(2 * LINE_SECONDS, lambda: self.agent.reap(self, code))

    def stop(self) -> None:
        self.process.stop()

    def go_on(self) -> None:
        self.went_on = self.world.now
        self.process.go_on()
        if self.connection is not None:
            self.connection.settle()

    def _ended(self, error: BaseException | None) -> None:
        """The script is over."""
        if not self.process.alive:
            return
        code = 0
        if isinstance(error, Exit):
            code = error.code
            if error.at_once:
                self.die(code)
                return
        elif isinstance(error, Interrupted):
            code = -SIGINT
        elif error is not None:
            code = UNCAUGHT
            self._tell_failure(error)
        # All have got Ctrl-C after the same step, so they come to their end together (dadt/inject/worker.py).
        failed = isinstance(error, DadtError | ScriptError) or (isinstance(error, Interrupted) and self.apart)
        self._main = Thread(self, self._close(failed=failed), lambda late: self._left(code))
        self._main.go_on()

    def _left(self, code: int) -> None:
        """The rank has met the others, or not: its exit code is its script's own."""
        if self.process.alive:
            self.process.after(self.world.spread(0.1), lambda: self.die(code))

    def _tell_failure(self, error: BaseException) -> None:
        self.world.note(self.process.name, f"fails: {type(error).__name__}: {error}")
        self.report(
            "failed", type=type(error).__name__, message=str(error)[:4000], frames=[], step=max(0, self.step),
            secondary=isinstance(error, CommError), thread="", time=self.agent.epoch, around=[],
        )  # fmt: skip

    # Training ----------------------------------------------------------------------------------------------------

    def _life(self) -> Steps:
        script, world = self.script, self.world
        yield self._sleep(world.spread(script.start_seconds))
        self.report("hello", torch="2.13.0")
        self.report("stacks", path=f"{STACKS}{self.pid}", signal=int(SIGUSR2))
        self.handles = True
        yield self._sleep(world.spread(script.start_seconds / 4))
        self._check_doom()
        claimed = yield from self._ask("claim")
        early = self.saves_raised
        self.saves_heard = self._saves_done = self._saves_agreed = claimed["saves"]
        self.saves_raised = self._saves_done + early
        self.report("listen")
        self.listens = self.deaths.listening = True
        if self.joins:
            yield from self._enter(StartTimeout("the launcher did not let this rank into the job"))
        yield from self._connect()
        if self.generation:
            with self._together():
                try:
                    yield from self._regroup()
                except CommError as error:
                    yield from self._again(error)
        while self.averaged < 0:
            yield from self._joined()
        while self.averaged < script.steps:
            yield self._sleep(world.spread(script.step_seconds) + self.pause)
            self.pause = 0.0
            self._check_doom()
            yield from self._step()
            self._progress()
            self.saves_raised = max(self.saves_raised, self._saves_agreed)
            if self.saves_raised > self._saves_done:
                self._saves_done = self.saves_raised
                yield self._sleep(script.save_seconds)
                if script.ends_when_saved:
                    break

    def _check_doom(self) -> None:
        if self.doom is not None:
            raise self.doom

    def _joined(self) -> Steps:
        with self._together():
            try:
                yield from self._call("joining", self.weights)
                self.averaged = 0
                self.weights = 1
            except CommError as error:
                yield from self._again(error)

    def _together(self) -> _Within:
        return _Within(self)

    def _again(self, error: CommError) -> Steps:
        """What Departure.regroup does."""
        if self.together or not self._survives:
            yield from self._connect_anew(error)
        else:
            yield from self._await_reconnection(error)

    def _step(self) -> Steps:
        """Average once, with all others where they step together."""
        if not self.together:
            self._check_background()
            self.deaths.check()
            self.averaged += 1
            self.step = self.averaged
            self.agent.job.invariants.trains(self)
            return
        if self.deaths.outdated:
            yield from self._connect_anew(PeerLost("ranks have ended"))
        self.deaths.check()
        before = self.averaged
        while self.averaged == before:
            try:
                value = self.rank, self.averaged, self.weights, self.saves_heard, self.interrupts_heard
                told = yield from self._call(f"step {self.averaged}", value)
                self.weights = mixed(self.weights, self.averaged, [each[0] for each in told])
                self.averaged += 1
                self._saves_agreed = max(each[3] for each in told)
                if any(each[4] for each in told) and not self.interrupted:
                    self.interrupted = True
                    self.step = self.averaged
                    if self.script.on_interrupt != "ignore":
                        raise Interrupted
            except CommError as error:
                yield from self._connect_anew(error)
        self.step = self.averaged
        self.deaths.stepped(self.step)

    def _progress(self) -> None:
        self.agent.beat_of(self.rank, self.step)
        if self.world.now - self._reported >= REPORT_SECONDS:
            self._reported = self.world.now
            self.report("numbers", step=self.step, numbers={"samples": 32.0 * self.step})

    def _call(self, name: str, value: Any) -> Steps:
        """One operation of the engine, with what Peers.wait does about it."""
        self._check_background()
        begun, connection = self.world.now, self.connection
        if connection is None:
            return [value]
        found: list[Any] = []
        waiting: list[Wait] = []

        def then(given: Any) -> None:
            found.append(given)
            for each in waiting:
                each.give()

        connection.begin(self.rank, name, value, then)
        while not found:

            def wait(each: Wait) -> None:
                waiting[:] = [each]
                self._wake(PATIENCE, each)

            yield wait
            if not found:
                yield from self._look(name, self.world.now - begun)
        if isinstance(found[0], CommError):
            if not self._survives:
                yield from self._name(found[0])
            raise found[0]
        return found[0]

    def _name(self, error: CommError) -> Steps:
        """What Deaths.name does: say which rank has ended, where that is known in a moment."""
        if isinstance(error, CommTimeout | Mismatch) or str(error) == self.deaths.text:
            return
        if (yield from self._await_news(NAME_SECONDS)):
            self.deaths.check()

    def _look(self, name: str, waited: float) -> Steps:
        """What Stall.look does."""
        answer = yield from self._ask("peers", generation=self.generation)
        peers = [each for each in answer["peers"] if each["rank"] != self.rank]
        who = ", ".join(f"rank {each['rank']} {each['state']}" for each in peers)
        try:
            before = None if self.closing else max(0, self.step)
            ended = [each for each in peers if each["said"].startswith("has ended")]
            if before is not None and any(each["step"] <= before for each in ended):
                raise Mismatch(f"rank {self.rank} is in {name}, {who}: the ranks do not run the same steps")
            if waited > self.config.timeout:
                raise CommTimeout(f"waited {waited:.0f} s in {name}: {who}")
            if waited > self.config.stall_warning and self._told_of != f"{self.generation} {name}":
                self._told_of = f"{self.generation} {name}"
                text = f"rank {self.rank} waits in {name}: {who}"
                if self.config.on_stall == "abort":
                    raise CommTimeout(f"{text}; waited {self.config.stall_warning:g} s (--on-stall abort)")
                self.report("say", text=text, level="warning")
                if self.config.on_stall == "dump":
                    self.report("dump")
        except CommError as error:
            self._abort(error)
            raise

    def _tell_waiting(self) -> Steps:
        yield from self._ask("peers", starts=max(0, self.step) == 0 and self.generation == 0)

    def _abort(self, error: CommError) -> None:
        if self.connection is not None:
            self.connection.abort(self.rank, error)

    # Connecting --------------------------------------------------------------------------------------------------

    def _meet(self, key: str, blob: bytes, timeout: float) -> Steps:
        apart = f"generation {self.generation} " if self.generation else ""
        if len(self.members) == 1:
            return [blob]
        facts = {"key": apart + key, "generation": self.generation}
        answer = yield from self._ask("exchange", timeout, blob, **facts)
        sizes, body, at = answer["sizes"], answer.body, 0
        blobs = []
        for size in sizes:
            blobs.append(body[at : at + size])
            at += size
        return blobs

    def _connect(self) -> Steps:
        """What Peers.connect does."""
        while True:
            try:
                yield from self._connected()
                break
            except (CommError, StartTimeout, DadtError) as error:
                yield from self._enter(error)
        self.connected, connection = True, self.connection
        self.deaths.watch(lambda reason, lost: self.process.get(lambda: self._lost(connection, reason)))

    def _lost(self, connection: Connection, reason: str) -> None:
        connection.abort(self.rank, PeerLost(reason))

    def _connected(self) -> Steps:
        config = self.config
        timeout = config.timeout if self.generation else config.start_timeout
        me = f"{self.rank}:{self.pid}".encode()
        met = yield from self._meet("connect", me, timeout)
        self.connection = self.agent.job.connections.join(self, self.generation, met)
        if len(met) == 1:
            return
        # A library that waits for the others within its own deadline, in a thread that is left behind.
        begun, found, waiting = self.world.now, [], []
        connection = self.connection
        connection.begin(self.rank, "connecting", None, lambda given: (found.append(given), _give(waiting)))
        looked = begun
        while not found:

            def wait(each: Wait) -> None:
                waiting[:] = [each]
                self._news.append(each)
                self._wake(0.5, each)

            yield wait
            if found:
                break
            if self._survives and self.deaths.outdated:
                raise PeerLost("ranks have ended")
            if self.world.now - begun > timeout:
                raise DadtError(LIBRARY)
            if self.world.now - looked >= PATIENCE:
                looked = self.world.now
                yield from self._tell_waiting()
        if isinstance(found[0], CommError):
            raise found[0]

    def _enter(self, error: Exception) -> Steps:
        """What Peers.enter does."""
        late = isinstance(error, StartTimeout) and not self.deaths.outdated
        if not self._survives or isinstance(error, Mismatch) or (late and self.closing):
            raise error
        if not self.deaths.outdated and self._may_have_passed(error):
            answer = yield from self._ask(
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
        while self.joins and self.rank not in generation.members:
            yield from self._await_generation(REGROUP_SECONDS)
            generation = self.deaths.enter(error, 0.0)
        if self.rank not in generation.members:
            raise PeerLost(f"the others train on without this rank: {generation.text}") from error
        self.members, self.generation = generation.members, generation.number
        self.joins = False
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
        starts = isinstance(error, StartTimeout) and max(0, self.step) == 0 and self.generation == 0
        return not (ours or wanted or starts)

    def _connect_anew(self, error: CommError) -> Steps:
        """What Recovery.connect_anew does."""
        if self._regrouping:
            raise error
        self._regrouping = True
        begun = self.world.now
        try:
            while True:
                yield from self._enter(error)
                try:
                    self._abort(CommError("hung up"))
                    yield from self._connect()
                    yield from self._regroup()
                    break
                except CommError as another:
                    error = another
        finally:
            self._regrouping = False
        text = f"{len(self.members)} workers train on from step {self.step}, {self.world.now - begun:.2f} s later"
        if self.rank == self.members[0]:
            self.report("say", text=text, level="info")

    def _regroup(self) -> Steps:
        """What dadt/train/loss/regroup.py does: all tell how far they are; those that are behind take the weights."""
        if len(self.members) == 1:
            return
        told = yield from self._call("position", (self.rank, self.averaged, self.weights))
        if not self.together:
            if self.averaged < 0 and (most := max(each[1] for each in told)) >= 0:
                self.averaged = self.step = most
            return
        _, most, weights = max(told, key=lambda each: each[1])
        least = min(each[1] for each in told)
        if most - least > 1:
            raise Mismatch(f"training cannot go on after ranks have connected anew: {told} cannot catch up")
        if least < most:
            yield from self._call("catching up", None)
            if self.averaged < most:
                self.averaged, self.weights = most, weights
        self.agent.job.agree(self, told)

    # Where nobody waits: a thread of its own connects anew ---------------------------------------------------------

    def _reconnect(self, failure: CommError | None) -> None:
        """What Reconnection.begin does."""
        if self._background is None and (failure is not None or self.deaths.outdated) and not self.trained:
            self._background = Thread(self, self._run(failure), lambda error: None)
            self._background.go_on()

    def _run(self, failure: CommError | None) -> Steps:
        done = False
        while not done:
            error, failure = failure or PeerLost("ranks have ended"), None
            try:
                yield from self._connect_anew(error)
                self._count += 1
            except (DadtError, Interrupted) as found:
                self._error = found
            done = self._error is not None or not self.deaths.outdated
        self._background = None
        self._wake_all()

    def _check_background(self) -> None:
        """What Reconnection.check does. In the background's thread it concerns nobody."""
        if self.together or self.current is self._background:
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

            def wait(each: Wait) -> None:
                self._news.append(each)
                self._wake(1.0, each)

            yield wait
        if self._error is not None:
            raise self._error
        if self._background is not None or self._count == before:
            raise error
        self._within = self._count

    # The end -----------------------------------------------------------------------------------------------------

    def _close(self, *, failed: bool) -> Steps:
        """What Departure.close does."""
        self.closing = True
        try:
            yield from self._leave(failed)
        except CommError:
            self._tell_end()
            raise
        self._tell_end()

    def _tell_end(self) -> None:
        if max(0, self.step):
            self.report("numbers", step=self.step, numbers={})
        self.report("done", summary={"steps": max(0, self.step)})

    def _leave(self, failed: bool) -> Steps:
        if failed or self.preempted or self.apart or self.connection is None:
            self._abort(CommError("has left"))
            return
        self.report("ending", steps=max(0, self.step))
        arrived = False
        try:
            with self._together():
                while True:
                    try:
                        if not self.together:
                            yield from self._call("the last average", None)
                        if self._survives:
                            yield from self._meet("the end", b"the end", self.config.timeout)
                        arrived = True
                        yield from self._call("the end", None)
                        break
                    except StartTimeout as error:
                        raise CommTimeout(str(error)) from error
                    except CommError as error:
                        if arrived or not self._survives:
                            raise
                        try:
                            yield from self._again(error)
                        except StartTimeout as late:
                            raise CommTimeout(str(late)) from late
        except CommError:
            if not arrived or not self._survives:
                raise
        finally:
            self.trained = True
            if self.connection is not None:
                self.connection.leave(self.rank, gentle=True)


class _Within:
    """What the training thread does with all ranks (Reconnection.within)."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __enter__(self) -> None:
        self._outer, self._worker._within = self._worker._within, self._worker._count

    def __exit__(self, *_: object) -> None:
        self._worker._within = self._outer


def _give(waiting: list[Wait]) -> None:
    for each in waiting:
        each.give()
