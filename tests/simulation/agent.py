"""A host and its agent: a model of dadt/launch/agent with the same frames, deadlines and order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from signal import SIGINT, SIGKILL, SIGTERM
from typing import TYPE_CHECKING, Any

from dadt.control.frame import Frame
from simulation.worker import LINE_SECONDS, Worker
from simulation.world import Process, Timer, Wire, World

if TYPE_CHECKING:
    from simulation.job import SimulatedJob

TURN_SECONDS = 0.5
TICK_SECONDS = 0.05
NATURAL_SECONDS = 0.5
STILL_SECONDS = 2.0
STACK_SECONDS = 0.5
ANSWER_SECONDS = 2.0
KILL_SECONDS = 3.0
WRITE_SECONDS = 0.02
"""What a worker takes to write its stacks."""
MOST_PATIENCE = 5.0
ENDING_SIGNALS = frozenset({1, SIGINT, SIGTERM})

Answer = Callable[[Frame], Any]


class Stop:
    """What dadt/launch/agent/stop.py does."""

    def __init__(self, agent: Agent, natural: float, grace: float, *, stacks: bool) -> None:
        now = agent.world.now
        self._agent, self._grace, self._natural_end = agent, grace, now + natural
        asked = [each for each in agent.living if each.rank in agent.offers] if stacks else []
        written = all(each.process.runs for each in asked)
        self._dumped_at = now if not asked else now + (WRITE_SECONDS if written else STACK_SECONDS)
        self._dumps = [each for each in asked if each.process.runs]
        self._kill_at = 0.0
        self.natural = natural > 0
        self.signalled = self.finished = False
        self.stuck: list[int] = []

    def end_naturally_in(self, seconds: float) -> None:
        self._natural_end = min(self._natural_end, self._agent.world.now + seconds)

    def hasten(self, grace: float) -> None:
        self._grace = min(self._grace, grace)
        if self.signalled:
            self._kill_at = min(self._kill_at, self._agent.world.now + grace)

    def advance(self) -> list[Worker]:
        """Returns the workers that have written their stacks."""
        now, dumps = self._agent.world.now, self._dumps
        if now < self._dumped_at:
            return []
        self._dumps = []
        left = [worker for worker in self._agent.workers.values() if worker.process.alive]
        if not left:
            self.finished = True
        elif not self.signalled:
            if now >= self._natural_end:
                self.signalled, self.natural, self._kill_at = True, False, now + self._grace
                for worker in left:
                    worker.signal(SIGTERM)
        elif now >= self._kill_at:
            for worker in left:
                worker.signal(SIGKILL)
            if now >= self._kill_at + KILL_SECONDS:
                self.stuck, self.finished = [worker.pid for worker in left], True
        return dumps


class Agent:
    """One host: its agent, what that knows of its workers, and the host's clock."""

    def __init__(self, world: World, job: SimulatedJob, index: int, clock: float) -> None:
        """clock: seconds by which this host's clock is ahead."""
        self.world, self.job, self.index, self.clock = world, job, index, clock
        self.process = Process(world, f"host{index}")
        self.crashed = False
        self.up: Wire
        self.workers: dict[int, Worker] = {}
        """Rank to its newest process."""
        self.offers: set[int] = set()
        """Ranks whose processes write their stacks when asked."""
        self._pulse: dict[int, tuple[int, float]] = {}
        self._ranks: Sequence[int] = ()
        self._ended: set[Worker] = set()
        """Workers that have ended, as this agent knows."""
        self._listening: list[Worker] = []
        self._claims: dict[int, Worker] = {}
        self._lines: dict[int, Answer] = {}
        self._numbered = 0
        self._regrouped: Frame | None = None
        self._stop: Stop | None = None
        self._gone = self._preempted = self._left = False
        self._signal = self._told_to_save = 0
        self._heard = world.now
        self._beaten = 0.0
        self._inquiries: list[tuple[float, Frame]] = []
        self._patience = job.config.orphan_timeout if job.hosts > 1 else float("inf")
        self._stays = False
        self._peers: dict[int, list[Any]] = {}
        """Other hosts: the time of the last heartbeat, whether it is silent, and whether it was ever heard."""
        self._looked = world.now
        self._timer: Timer | None = None

    @property
    def epoch(self) -> float:
        """The time by this host's clock, in seconds since the epoch."""
        return self.world.epoch + self.clock

    @property
    def living(self) -> list[Worker]:
        """The workers that have not ended, as far as this agent knows."""
        return [worker for worker in self.workers.values() if worker not in self._ended]

    # From the launcher -------------------------------------------------------------------------------------------

    def hear(self, frame: Frame) -> None:
        """A frame of the launcher has come."""
        self.process.get(lambda: self._obey(frame))

    def hang_up(self, why: str) -> None:
        """The connection to the launcher has ended."""
        self.process.get(lambda: self._lose_launcher(why))

    def _lose_launcher(self, why: str) -> None:
        self._gone = True
        self._turn()

    def _obey(self, order: Frame) -> None:
        if self._gone:
            return
        self._heard = self.world.now
        kind = order.kind
        if kind == "job":
            self._start(order)
        elif kind == "stop":
            self._begin_stop(order.header)
        elif kind == "interrupt" and self._stop is None:
            self._interrupt(order["grace"])
            self._begin_stop({"natural": order["grace"], "grace": order["grace"]})
        elif kind == "preempt":
            self._preempt(together=True)
        elif kind == "answer":
            answer = dict(order["answer"])
            if (line := self._lines.pop(order["line"], None)) is not None:
                line(Frame(answer.pop("kind"), answer, order.body))
        elif kind == "stacks":
            self._inquire(order)
        elif kind == "heartbeat":
            self._peers = {h["index"]: self._peers.get(h["index"], [self.world.now, False, False])
                           for h in order["hosts"] if h["index"] != self.index}  # fmt: skip
        elif kind in ("death", "regroup", "approach"):
            if kind == "regroup":
                self._regrouped = order
            for worker in self._listening:
                self._tell(worker, order)
        elif kind == "worker" and order["rank"] in self._ranks and self._stop is None:
            self._pulse[order["rank"]] = -1, self.world.now
            self._own(order["rank"], joins=True)
        elif kind == "signal" and "rank" not in order.header and order["number"] == self.job.checkpoint_signal:
            self._save(together=True)
        elif kind == "signal":
            for worker in self.living:
                if order.get("rank", worker.rank) == worker.rank:
                    worker.signal(order["number"])
        self._turn()

    def _start(self, job: Frame) -> None:
        self._ranks = [worker["rank"] for worker in job["workers"]]
        self._pulse = dict.fromkeys(self._ranks, (-1, self.world.now))
        self._stays = job.get("stays", False)
        if job.get("heartbeat") is not None:
            self._say("heartbeat", port=4000 + self.index)
        for rank in self._ranks:
            self._own(rank, joins=False)

    def _own(self, rank: int, *, joins: bool) -> None:
        worker = self.workers[rank] = self.job.spawn(self, rank, joins=joins)
        self.offers.discard(rank)
        self._say("started", rank=rank, pid=worker.pid)

    def _tell(self, worker: Worker, frame: Frame) -> None:
        self.world.after(LINE_SECONDS, lambda: worker.process.get(lambda: worker.hear(frame)))

    def _interrupt(self, grace: float) -> None:
        told = self._tell_training(Frame("interrupt", {"patience": min(grace / 4, MOST_PATIENCE)}))
        for worker in self.living:
            if worker.rank not in told:
                worker.signal(SIGINT)

    def _tell_training(self, frame: Frame) -> set[int]:
        told = [each for each in self._listening if self._claims.get(each.rank) is each and each.process.alive]
        for worker in told:
            self._tell(worker, frame)
        return {worker.rank for worker in told}

    def _save(self, *, together: bool) -> None:
        patience = min(self.job.config.grace / 4, MOST_PATIENCE) if together else 0.0
        self._told_to_save += patience > 0
        told = self._tell_training(Frame("save", {"patience": patience}))
        heedless = [worker.rank for worker in self.living if worker.rank not in told]
        if heedless:  # they have not imported what handles the signal
            self._say("unheeded", number=self.job.checkpoint_signal, ranks=heedless)

    def _preempt(self, *, together: bool) -> None:
        if not self.job.checkpoint_signal or self._preempted or self._stop is not None:
            return
        self._preempted = True
        for worker in self._listening:
            self._tell(worker, Frame("preempted"))
        self._save(together=together)
        self._begin_stop({"natural": self.job.config.grace, "grace": self.job.config.grace})

    def _begin_stop(self, order: Mapping[str, Any]) -> None:
        grace = order.get("grace", 1.5)
        stop = Stop(self, order.get("natural", 0.0), grace, stacks=order.get("stacks", False))
        if self._stop is None or self._stop.natural:
            self._stop = stop
        else:
            self._stop.hasten(grace)

    def _inquire(self, order: Frame) -> None:
        ranks = [rank for rank in order["ranks"] if rank in self._ranks]
        late = any(not self.workers[rank].process.runs for rank in ranks)
        at = self.world.now + (ANSWER_SECONDS if late else WRITE_SECONDS)
        for rank in ranks:
            problem = "" if rank in self.offers and self.workers[rank].process.runs else "it did not answer"
            header = {"number": order["number"], "rank": rank, "problem": problem}
            self._inquiries.append((at, Frame("stack", header, b"" if problem else b"stack\n")))

    # From workers and the kernel ---------------------------------------------------------------------------------

    def line(self, worker: Worker, frame: Frame, answer: Answer | None) -> None:
        """A worker says something, and waits for the answer on a line of its own if there is one."""
        self.world.after(LINE_SECONDS, lambda: self.process.get(lambda: self._receive(worker, frame, answer)))

    def _receive(self, worker: Worker, frame: Frame, answer: Answer | None) -> None:
        self._numbered += 1
        if answer is not None and worker.process.alive:
            self._lines[self._numbered] = answer
        if frame.kind == "claim":
            self._claims[worker.rank] = worker
            self._lines.pop(self._numbered, None)
            if answer is not None:
                answer(Frame("claimed", {"signal": self.job.checkpoint_signal, "saves": self._told_to_save}, b"secret"))
        if not self._gone:
            self.up.send(Frame(frame.kind, {**frame.header, "line": self._numbered}, frame.body))

    def listen(self, worker: Worker) -> None:
        """The worker wants to hear of the ends of others."""
        self.world.after(LINE_SECONDS, lambda: self.process.get(lambda: self._listen(worker)))

    def _listen(self, worker: Worker) -> None:
        self._listening.append(worker)
        if self._regrouped is not None:
            self._tell(worker, self._regrouped)

    def offer_stacks(self, worker: Worker) -> None:
        self.offers.add(worker.rank)

    def beat_of(self, rank: int, step: int) -> None:
        """A worker writes its step into the memory that it shares with this agent."""
        self._pulse[rank] = step, self.world.now

    def reap(self, worker: Worker, code: int) -> None:
        """A worker's process has ended."""
        self._ended.add(worker)
        if worker in self._listening:
            self._listening.remove(worker)
        stopped = self._stop is not None and self._stop.signalled
        memory = dict.fromkeys(("peak_memory", "memory_limit", "memory_kills"), 0)
        step = self._pulse[worker.rank][0]
        self._say("exit", rank=worker.rank, code=code, step=step, stopped=stopped, time=self.epoch, **memory)
        self._turn()

    def signal(self, number: int) -> None:
        """Somebody signals this agent."""
        self.process.get(lambda: self._caught(number))

    def _caught(self, number: int) -> None:
        if number == SIGTERM and self.job.checkpoint_signal and (self._stop is None or self._preempted):
            self._say("preempted")
            self._preempt(together=not self.job.alone(len(self._ranks)))
        elif number in ENDING_SIGNALS:
            self._signal = number
            self._begin_stop({})
        self._turn()

    # As time passes ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to serve."""
        self._turn()

    def _turn(self) -> None:
        if self._left or not self.process.runs:
            return
        now = self.world.now
        if now - self._heard > self._patience:
            self._gone = True
        for at, frame in [each for each in self._inquiries if now >= each[0]]:
            self._inquiries.remove((at, frame))
            self._send(frame)
        self._look_at_hosts(now)
        self._beat(now)
        if self._gone and (self._stop is None or self._stop.natural):
            self._begin_stop({})
        elif self._stop is None and self.workers and not self.living and not self._stays:
            self._begin_stop({"natural": NATURAL_SECONDS})
        stop = self._stop
        if stop is not None and not stop.finished:
            if not self.living:
                stop.end_naturally_in(NATURAL_SECONDS)
            for worker in stop.advance():
                self._send(Frame("stacks", {"rank": worker.rank, "pid": worker.pid}, b"stack\n"))
        if stop is not None and stop.finished and (stop.stuck or not self.living):
            self._send(Frame("end", {"stuck": stop.stuck, "signal": self._signal}))
            self._left = True
            self.die()
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.process.after(TICK_SECONDS if stop or self._inquiries else TURN_SECONDS, self._turn)

    def _beat(self, now: float) -> None:
        if now - self._beaten < TURN_SECONDS:
            return
        self._beaten = now
        steps = {str(rank): [step, now - at] for rank, (step, at) in self._pulse.items()}
        conditions = {}
        for worker in self.living:
            if worker.process.stops and steps[str(worker.rank)][1] > STILL_SECONDS:
                conditions[str(worker.rank)] = "stopped"
        memory = {str(worker.rank): 1 << 28 for worker in self.living}
        self._say("beat", steps=steps, memory=memory, conditions=conditions, clock=self.epoch)

    def _look_at_hosts(self, now: float) -> None:
        """What HostHeartbeat.turn does, without a datagram for each heartbeat."""
        timeout = self.job.config.heartbeat_timeout
        if now - self._looked > timeout / 2:
            for peer in self._peers.values():
                if not peer[1]:
                    peer[0] = now
        self._looked = now
        if self.job.quiet and not any(peer[1] or not peer[2] for peer in self._peers.values()):
            for peer in self._peers.values():
                peer[0] = now
            return
        for index, peer in self._peers.items():
            if self.job.hears(self.index, index):
                peer[0], peer[2] = now, True
            late = now - peer[0] >= timeout
            if peer[2] and late != peer[1]:
                peer[1] = late
                self._say("silent" if late else "heard", peer=index, seconds=now - peer[0])

    def _say(self, kind: str, **facts: Any) -> None:
        self._send(Frame(kind, facts))

    def _send(self, frame: Frame) -> None:
        if not self._gone:
            self.up.send(frame)

    # The end -----------------------------------------------------------------------------------------------------

    def die(self) -> None:
        """The agent's process ends, and the kernel kills its workers."""
        if self.process.alive:
            self.process.alive = False
            self.up.close()
            for worker in self.workers.values():
                worker.die(-SIGKILL)

    def crash(self) -> None:
        """The machine is gone."""
        self.crashed, self.process.alive = True, False
        self.up.vanish()
        for worker in self.workers.values():
            worker.die(-SIGKILL, silent=True)

    def stop(self) -> None:
        """The agent's process stops, not its workers."""
        self.process.stop()

    def go_on(self) -> None:
        self.process.go_on()
        self.process.get(self._turn)
