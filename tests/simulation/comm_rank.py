"""One rank that exchanges named tensors: DADT's own negotiation and engine, and a small model of a script."""

from __future__ import annotations

import select
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from dadt import _core
from dadt.comm.collectives.named import Named
from dadt.comm.collectives.operation import Operation
from dadt.comm.keepalive import KeepAlive
from dadt.errors import CommError, CommTimeout, Mismatch
from simulation.comm_scenario import NamedTensor
from simulation.comm_wire import ByteWire
from simulation.world import Alarm, Broken, Process

if TYPE_CHECKING:
    from simulation.comm_negotiation import NegotiationJob

ADDRESS = 4096
"""Stands for all memory: nothing in this world reads or writes it."""
WAKE_SECONDS = 0.00005
"""What a thread takes to wake up."""
MOST_TURNS = 200
"""Turns of a negotiation without any time between them: more of them mean that it does not sleep."""

ScriptSteps = Generator[float | None, None, None]
"""What a script does: it yields the seconds that it sleeps, or None to look again once something has changed."""


@dataclass(slots=True)
class Submitted:
    """One tensor as a rank has submitted it, and how that has ended."""

    round: int
    tensor: NamedTensor
    ticket: _core.Ticket
    at: float
    ended: float | None = None
    error: Exception | None = None
    told: bool = False
    """Whether the user has been told that it waits."""


class SimulatedNamed(Named):
    """The named tensors of one rank, without a connection of its own and without threads."""

    def __init__(self, job: NegotiationJob, rank: int, sockets: Sequence[int]) -> None:
        scenario = job.scenario
        self.rank, self.size = rank, scenario.size
        self.connection = job.engines.connections[rank]
        self._on_stall, self._dump = scenario.on_stall, None
        engine = self.connection.engine
        self._negotiation = _core.Negotiation(
            engine,
            engine,
            rank,
            scenario.size,
            sockets,
            scenario.cycle,
            scenario.buffer_bytes,
            scenario.buffer_bytes,
            scenario.stall_warning,
            job.time,
            scenario.cache,
        )
        self._kept = KeepAlive(self._has_failed)

    @property
    def negotiation(self) -> _core.Negotiation:
        return self._negotiation

    def start(self, call: Operation, tensor: NamedTensor) -> _core.Ticket:
        ticket = self.submit(call, tensor.name, tensor.group, tensor.group_size)._work
        assert isinstance(ticket, _core.Ticket)
        return ticket

    def hear(self, notices: Sequence[_core.Notice]) -> None:
        self._hear(notices)


class NamedRank:
    """One process that submits named tensors, from its start to its end."""

    def __init__(self, job: NegotiationJob, rank: int, sockets: Sequence[int]) -> None:
        self.job, self.world, self.rank = job, job.world, rank
        self.process = Process(job.world, f"rank {rank}")
        self.named = SimulatedNamed(job, rank, sockets)
        self.submitted: list[Submitted] = []
        self.over = False
        """Whether its negotiation has ended."""
        self.over_at = float("inf")
        self.failed = ""
        """Why it has failed by itself."""
        self.joined_at = float("inf")
        """When it has begun to join."""
        self.last_joined = -1
        self.asleep = False
        self.wires: list[ByteWire] = []
        """All that leads to it, or away."""
        self.own_wires: list[ByteWire] = []
        """Those over which it sends."""
        self._alarm = Alarm(self.process, self._take_turn)
        self._turns = 0
        self._waits = False
        self._polled = select.poll()
        for each in sockets:
            if each >= 0:
                self._polled.register(each, select.POLLIN)
        self._script: ScriptSteps | None = self._life()
        self.process.after(self.world.spread(0.1), self._go_on)

    # The negotiation's thread --------------------------------------------------------------------------------------

    def poke(self) -> None:
        """Something has changed: the thread wakes up."""
        self._alarm.set(self.world.spread(WAKE_SECONDS))

    def _take_turn(self) -> None:
        if self.over or not self.process.alive:
            return
        self.job.time.set(self.world.now)
        left = self.named.negotiation.turn()
        self.job.turned(self)
        if left is None:
            self._end()
        elif left < 1e9:
            self._turns = 0 if left > 0 else self._turns + 1
            if self._turns > MOST_TURNS:
                raise Broken(f"the negotiation of rank {self.rank} does not sleep")
            self._alarm.set(max(left, 1e-9) + self.world.random.random() * WAKE_SECONDS)
        if not self.over and any(not event & select.POLLNVAL for _, event in self._polled.poll(0)):
            self._alarm.set(WAKE_SECONDS)  # a turn may leave something to read, as the end of a connection
        self.look()

    def look(self) -> None:
        """What the script and the thread that prints stalls do once something has changed."""
        if news := self.named.negotiation.notices(0.0):
            self.job.invariants.hear(news)
            self.named.hear(news)
            self.poke()
        if self._waits:
            self._go_on()

    # The script ----------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        if self._script is None or not self.process.alive:
            return
        self._waits = False
        self.job.time.set(self.world.now)
        try:
            seconds = next(self._script)
        except StopIteration:
            self._script = None
            return
        if seconds is None:
            self._waits = True
        else:
            self.process.after(seconds, self._go_on)

    def _life(self) -> ScriptSteps:
        scenario, job = self.job.scenario, self.job
        random = Random(f"{scenario.seed} {self.rank}")
        before: list[Submitted] = []
        try:
            for number in range(len(scenario.rounds)):
                if scenario.joins.get(self.rank) == number:
                    break
                if any(fault.round == number and job.ends_early(fault, self.rank) for fault in scenario.faults):
                    job.strikes(next(f for f in scenario.faults if job.ends_early(f, self.rank)))
                    return
                self.named.set_step(number)
                mine = []
                for tensor in self._tensors(number, random):
                    mine.append(self._submit(number, tensor))
                    if random.random() < 0.3:
                        yield random.random() * 0.1 * scenario.step_seconds
                yield from self._await_all(before if scenario.overlap else mine)
                before = mine
                yield random.random() * scenario.step_seconds
            yield from self._await_all(before)
            if scenario.joins:
                yield from self._join()
        except (CommError, RuntimeError) as error:
            self.fail(f"rank {self.rank} failed: {error}")
            return
        finally:
            self.leave()

    def _tensors(self, number: int, random: Random) -> list[NamedTensor]:
        tensors = list(self.job.scenario.rounds[number])
        for fault in self.job.scenario.faults:
            if fault.rank == self.rank and fault.round == number and tensors:
                changed = fault.submits(list(tensors), random)
                if changed != tensors:
                    self.job.strikes(fault)
                tensors = changed
        random.shuffle(tensors)
        return tensors

    def _submit(self, number: int, tensor: NamedTensor) -> Submitted:
        pieces = [(ADDRESS, 8)] * self.job.scenario.size
        call = Operation("", tensor.signature, tensor.kind)
        if tensor.kind == "exchange":
            call.sends, call.receives = pieces, None
        else:
            call.layout = self.job.layout(tensor)
            call.inputs = call.outputs = [ADDRESS]
            call.reduction, call.root = getattr(_core.Reduction, tensor.reduction), tensor.root
        ticket = self.named.start(call, tensor)
        made = Submitted(number, tensor, ticket, self.world.now)
        self.submitted.append(made)
        self.world.note(self.process.name, f"submits {tensor}")
        self.poke()
        return made

    def _await_all(self, submitted: Sequence[Submitted]) -> ScriptSteps:
        for each in submitted:
            yield from self._await(each.ticket)
            self._settle(each)
            if each.error is not None:
                self.world.note(self.process.name, f"{each.tensor.name}: {type(each.error).__name__}: {each.error}")
                if not (self.job.scenario.tolerant and isinstance(each.error, Mismatch)):
                    raise each.error

    def _await(self, ticket: _core.Ticket) -> ScriptSteps:
        deadline = self.world.now + self.job.scenario.timeout
        if ticket.done:
            return
        ticket.tell_that_it_is_waited_for()
        self.poke()
        self.process.after(self.job.scenario.timeout, self.look)
        while not ticket.done:
            if self.world.now >= deadline:
                raise CommTimeout(f'"{ticket.name}" was not done in time')
            yield None

    def _settle(self, each: Submitted) -> None:
        if each.ended is None and each.ticket.done:
            each.ended = self.world.now
            try:
                each.ticket.wait(0.0)
            except (CommError, RuntimeError) as error:
                each.error = error
                if not isinstance(error, CommError) and self.job.invariants.sane:
                    raise Broken(f"rank {self.rank}: {error}") from error

    def settle_all(self) -> None:
        for each in self.submitted:
            self._settle(each)

    def _join(self) -> ScriptSteps:
        ticket, self.joined_at = self.named.join(), self.world.now
        self.poke()
        yield from self._await(ticket)
        ticket.wait(0.0)
        self.last_joined = ticket.last_joined
        self.world.note(self.process.name, f"has joined; the last was {self.last_joined}")

    # The end -------------------------------------------------------------------------------------------------------

    def fail(self, reason: str) -> None:
        """What a session does where its script has failed."""
        self.world.note(self.process.name, f"fails: {reason}")
        self.failed = self.failed or reason
        self.job.time.set(self.world.now)
        self.named.abort(reason)
        self.leave()

    def leave(self) -> None:
        """The script is over: take leave of the peers within the timeout."""
        if self.asleep or self.over:
            return
        self.asleep = True
        self._script = None
        self.job.time.set(self.world.now)
        self.named.negotiation.leave()
        self.poke()
        self.process.after(self.job.scenario.timeout, self._close)

    def _close(self) -> None:
        if not self.over and self.process.alive:
            self.job.time.set(self.world.now)
            try:
                self.named.negotiation.close(0.0)
            except CommTimeout as error:
                self.world.note(self.process.name, f"closes: {error}")
                self.failed = self.failed or str(error)
            self.job.turned(self)
            self._end()

    def _end(self) -> None:
        self.over, self.over_at = True, self.world.now
        self.world.note(self.process.name, "has ended")
        self.job.ended(self)

    def go_on(self) -> None:
        self.process.go_on()

    def die(self, *, silent: bool) -> None:
        self.world.note(self.process.name, "is gone")
        self.process.alive = False
        self.over, self.over_at = True, self.world.now
        self.job.lost(self, silent=silent)
