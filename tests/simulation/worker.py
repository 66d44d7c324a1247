"""A worker: a small model of training, with the control frames, deadlines and order of dadt/train."""

from __future__ import annotations

from collections.abc import Callable
from signal import SIGINT, SIGKILL, SIGTERM, SIGUSR2
from typing import TYPE_CHECKING, Any

from dadt import errors
from dadt.config import Config
from dadt.control.agent_client import ANSWER_SECONDS, report_seconds
from dadt.control.frame import Frame
from dadt.control.worker_line import parts
from dadt.errors import CommError, CommTimeout, DadtError, PeerLost, StartTimeout
from dadt.inject.replay.replay import NEWS_SECONDS
from dadt.train.approaches import Approach, Approaches
from simulation.worker_handover import REPLAYED, Newcomer, WorkerHandover
from simulation.worker_island import WorkerIsland
from simulation.worker_peers import WorkerPeers
from simulation.worker_script import Exit, Interrupted, Script, ScriptError
from simulation.worker_snapshots import WorkerSnapshots
from simulation.worker_thread import Late, Steps, Thread, Wait
from simulation.worker_training import Training
from simulation.world import Process, World

if TYPE_CHECKING:
    from simulation.agent import Agent

LEAST_SECONDS = 1.0
LINE_SECONDS = 0.0003
"""What a frame takes between a worker and its agent."""
UNCAUGHT = 1
STACKS = "/tmp/dadt/job/stacks-"
"""Where workers write their stacks."""


class Worker:
    """One process of a rank, from its start to its end."""

    def __init__(
        self, world: World, agent: Agent, rank: int, pid: int, script: Script, config: Config, *, joins: bool
    ) -> None:
        self.world, self.agent, self.rank, self.pid, self.script, self.config = world, agent, rank, pid, script, config
        self.born = world.now
        self.host = agent.machine
        self.process = Process(world, f"rank {rank}")
        self.went_on = float("-inf")
        """When it has last gone on after a stop."""
        self.handles = False
        """Whether the script has a handler for the signal by which it saves."""
        self.code: int | None = None
        """How the process has ended; None while it runs."""
        self.doom: Exception | None = None
        """What the script raises in its next step."""
        self.pause = 0.0
        """Seconds that its next step takes more."""
        self.step = -1
        self.closing = False
        self.preempted = self.apart = self.interrupted = False
        self.saves_heard = self.saves_raised = self.interrupts_heard = 0
        self._saves_done = self.saves_agreed = self._saves_due = self.interrupts_due = 0
        self._saves_to_leave = False
        self._signalled = False
        """Whether the script got the signal from its agent, not from DADT, and has not saved for it."""
        self._searches = 0
        """How many steps are being found that all ranks of islands have yet to complete."""
        self._searched: list[Wait] = []
        self._reported, self.stepped_at = float("-inf"), float("-inf")
        """When this rank last told the launcher of its step, and when it last took one."""
        self.current: Thread | None = None
        self.peers = WorkerPeers(self, joins=joins)
        self.training = Training(self)
        self.island = WorkerIsland(self)
        self.snapshots = WorkerSnapshots(self)
        self.approaches = Approaches()
        self.handover = WorkerHandover(self)
        self._main = Thread(self, self._life(joins=joins), self._ended)
        self.process.after(0.0, self._main.go_on)

    @property
    def trains(self) -> bool:
        """Whether it has joined the others, and takes steps."""
        return self.training.begun

    # Waiting -----------------------------------------------------------------------------------------------------

    def sleep(self, seconds: float, *until: list[Wait]) -> Callable[[Wait], None]:
        """A wait of so many seconds, which whoever gives to the waits in one of these lists ends before."""

        def wait(each: Wait) -> None:
            for some in until:
                some.append(each)
            self.world.after(seconds, each.give)

        return wait

    def ask(self, kind: str, timeout: float = 0.0, body: bytes = b"", **header: Any) -> Steps:
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

    def hear(self, frame: Frame) -> None:
        """What the thread that listens to the agent does (Runtime._hear)."""
        if frame.kind == "preempted":
            self.preempted = True
        elif frame.kind == "interrupt":
            if not self.closing and not self.interrupts_heard:
                self.interrupts_heard = 1
                together = self.peers.together and self.trains
                patience = frame["patience"] if together else 0.0
                if self.island.is_apart and patience:
                    self._find_step("signal 2, 1", patience, self._interrupts_at)
                self.process.after(patience, lambda: self._interrupt_late(patience))
        elif frame.kind == "save":
            patience = frame["patience"] if self.peers.together or self.island.is_apart else 0.0
            if self.island.is_apart and patience:
                self._save_with_island(patience, frame["count"])
                return
            count = frame["count"] if patience else self.saves_raised + 1
            self.saves_heard = max(self.saves_heard, frame["count"])
            self.process.after(patience, lambda: self._save_late(count))
        elif frame.kind == "approach":
            request = self.approaches.hear(Approach(frame["number"], frame["rank"], frame["known"], frame["last"]))
            if self.island.is_apart:
                self._find_step(f"new worker {frame['number']}", self.config.timeout, request.agree_on)
        elif frame.kind in ("regroup", "death"):
            self.peers.hear(frame)

    def _save_with_island(self, patience: float, count: int) -> None:
        """What CheckpointSignal._hear_in_island does."""
        if not count and self._saves_to_leave:
            return
        self._saves_to_leave |= not count
        number = count or max(self.saves_heard, self.saves_raised) + 1
        self.saves_heard = max(self.saves_heard, count)
        if count and self.peers.together:
            self._find_step(f"signal 10, {count}", patience, lambda step: self._saves_at(step, count))

        def in_time() -> None:
            if max(0, self.step) >= self._saves_due - 1:
                self._save_late(number)

        def agree(step: int) -> None:
            if self.saves_agreed < number:
                self._saves_at(step, number)
            self.process.after(patience, in_time)

        self._find_step(f"signal 10, {number}", patience, agree, island=True)

    def _find_step(self, key: str, seconds: float, found: Callable[[int], None], *, island: bool = False) -> None:
        """What CommonStep.find and find_in_island do, in a thread of their own."""
        among, until = {"island": True} if island else {}, self.world.now + seconds
        self._searches += 1

        def ask() -> Steps:
            generation, newer = -1, self.peers.deaths.await_newer(0, 0.0)
            while newer != generation:
                told, generation = str(max(0, self.step)).encode(), newer
                try:
                    asked = {"key": f"step of {key}", "generation": generation, **among}
                    answer = yield from self.ask("exchange", max(0.0, until - self.world.now), told, **asked)
                    found(max(map(int, parts(answer))) + 1)
                except DadtError as error:
                    self.world.note(self.process.name, f"finds no step for {key}: {error}")
                    if island:
                        newer = yield from self.peers.await_newer(generation, until - self.world.now)
            self._searches -= 1
            searched, self._searched = self._searched, []
            for wait in searched:
                wait.give()

        Thread(self, ask(), lambda error: None).go_on()

    def _interrupts_at(self, step: int) -> None:
        self.peers.interrupts_agreed, self.interrupts_due = True, step

    def _saves_at(self, step: int, count: int) -> None:
        self.saves_agreed, self._saves_due = max(self.saves_agreed, count), step

    def know_step(self) -> Steps:
        """Wait while a common step is found (CommonStep.stepped)."""
        while self._searches:
            yield self.sleep(ANSWER_SECONDS, self._searched)

    def _interrupt_late(self, patience: float) -> None:
        if not self.interrupted:
            self.apart = True
            if self.script.on_interrupt != "ignore":
                self.process.after(max(patience, LEAST_SECONDS), lambda: self.peers.abort(CommError("interrupted")))
            self._interrupt()

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
            self._signalled = True

    def _terminate(self) -> None:
        if self.script.on_terminate == "end":
            self.die(-SIGTERM)
        elif self.script.on_terminate == "save":
            self.process.after(self.script.save_seconds, lambda: self.die(0))

    def die(self, code: int, *, silent: bool = False) -> None:
        """The process ends. silent: with its machine."""
        if self.process.alive:
            self.process.alive, self.code = False, code
            self._main.over = True
            self.world.note(self.process.name, f"ends with code {code}")
            self.peers.leave(silent=silent)
            self.island.leave(silent=silent)
            if not silent:
                self.agent.process.after(2 * LINE_SECONDS, lambda: self.agent.reap(self, code))

    def stop(self) -> None:
        self.process.stop()

    def go_on(self) -> None:
        self.went_on = self.world.now
        self.process.go_on()
        if self.peers.connection is not None:
            self.peers.connection.settle()
        self.island.settle()

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
            self._main = Thread(
                self,
                self.snapshots.close(),
                lambda _: self.process.after(self.world.spread(self.script.exit_seconds), lambda: self.die(code)),
            )
            self._main.go_on()

    def _tell_failure(self, error: BaseException) -> None:
        kind = error.kind if isinstance(error, ScriptError) else type(error).__name__
        self.world.note(self.process.name, f"fails: {kind}: {error}")
        ours = f"dadt: rank {self.rank} ended" if isinstance(error, DadtError) else kind
        self.agent.job.printed.append((self.world.now, f"[{self.rank}] {ours}: {error}"))
        self.report(
            "failed", type=kind, message=str(error)[:4000], frames=[], step=max(0, self.step),
            secondary=isinstance(error, CommError), thread="", time=self.agent.uptime, around=[],
        )  # fmt: skip

    # Training ----------------------------------------------------------------------------------------------------

    def _life(self, *, joins: bool) -> Steps:
        script, world = self.script, self.world
        yield self.sleep(world.spread(script.start_seconds))
        self.report("hello", torch="2.13.0")
        self.report("stacks", path=f"{STACKS}{self.pid}", signal=int(SIGUSR2))
        self.handles = True
        yield self.sleep(world.spread(script.start_seconds / 4))
        self._check_doom()
        yield from self.island.gather("beginning")
        newcomer = Newcomer(self) if joins and self.peers.together else None
        if newcomer is not None:
            yield from newcomer.replay()
        elif self.config.resume:
            yield from self._replay()
        claimed = yield from self.ask("claim")
        self.saves_heard = self.saves_raised = self._saves_done = self.saves_agreed = claimed["saves"]
        if not self.peers.deaths.listening:
            self.report("listen")
            self.peers.deaths.listening = True
        yield from self.peers.begin()
        if newcomer is not None:
            yield from newcomer.take_state()
        yield from self.training.join()
        if self.config.resume and newcomer is None:
            yield from self._exchange("resumed")
        made = 0  # with gossip a new worker takes the others' count, but runs its script from its beginning
        while (max(0, self.step) if self.peers.together else made) < script.steps:
            made += 1
            yield from self.training.begin_pass()
            if self.peers.together:
                if self.training.begun and self.peers.deaths.outdated:  # Runtime.begin
                    yield from self.peers.connect_anew(PeerLost("ranks have ended"))
                yield from self.handover.saw()
            yield self.sleep(world.spread(script.step_seconds) + self.pause)
            self.pause = 0.0
            self._check_doom()
            yield from self.island.gather("backward")
            yield from self.training.step()
            self._progress()
            if self.peers.together:
                self.snapshots.stepped()
                yield from self.handover.stepped()
            yield from self.training.evaluate()
            if self.step >= self._saves_due:
                self.saves_raised = max(self.saves_raised, self.saves_agreed)
            if self.saves_raised > self._saves_done or self._signalled:
                self.agent.job.invariants.saves(self)
                self._saves_done, self._signalled = self.saves_raised, False
                yield from self.island.gather("saving")
                yield self.sleep(script.save_seconds)
                if script.ends_when_saved:
                    break

    def _replay(self) -> Steps:
        """Run the script up to the snapshot that the job goes on from (dadt/inject/replay/replay.py)."""
        content = self.agent.job.run.snapshots.read(self)
        yield from self._exchange("replay")
        yield self.sleep(content.step * self.script.step_seconds * REPLAYED)
        self.training.resume(content.step, content.weights)
        self.snapshots.goes_on_from(content.step)

    def _exchange(self, what: str) -> Steps:
        """What Replay._exchange does."""
        deaths = self.peers.deaths
        if not deaths.listening:
            self.report("listen")
            deaths.listening = True
        number = deaths.await_newer(0, 0.0)
        while self.agent.job.size > 1:
            try:
                yield from self.ask("exchange", self.config.start_timeout, key=what, generation=number)
                return
            except PeerLost:
                before, until = number, self.world.now + NEWS_SECONDS
                while (number := deaths.await_newer(before, 0.0)) == before and self.world.now < until:
                    yield self.sleep(until - self.world.now, self.peers.news)
                if number == before:
                    raise

    def _check_doom(self) -> None:
        if self.doom is not None:
            raise self.doom

    def _progress(self) -> None:
        self.stepped_at = self.world.now
        self.agent.beat_of(self.rank, self.step)
        if self.world.now - self._reported >= report_seconds(self.agent.job.size):
            self._reported = self.world.now
            self.report("numbers", step=self.step, numbers={"samples": 32.0 * self.step})

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
        if failed or self.preempted or self.apart or self.peers.connection is None:
            self.peers.abort(CommError("has left"))
            return
        self.report("ending", steps=max(0, self.step), gathered=self.training.gatherings.count)
        arrived = False
        try:
            with self.peers.within():
                while True:
                    try:
                        if not self.peers.together:
                            yield from self.peers.call("the last average", None)
                        if self.peers.survives or not self.peers.mismatch_is_told:
                            yield from self.peers.meet("the end", b"the end", self.config.timeout)
                        arrived = True
                        yield from self.snapshots.close()
                        yield from self.peers.call("the end", None)
                        break
                    except StartTimeout as error:
                        raise CommTimeout(str(error)) from error
                    except CommError as error:
                        if arrived or not self.peers.survives:
                            raise
                        try:
                            yield from self.peers.again(error)
                        except StartTimeout as late:
                            raise CommTimeout(str(late)) from late
        except CommError:
            if not arrived or not self.peers.survives:
                raise
        finally:
            self.peers.trained = True
            self.peers.leave(gentle=True)
