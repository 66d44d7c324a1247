"""What workers do together without the launcher: operations that end once all ranks of a connection have come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dadt.errors import CommError, CommTimeout, Mismatch
from simulation.world import Network, Process, World

if TYPE_CHECKING:
    from simulation.agent import Agent
    from simulation.worker_thread import Wait

LATENCY = 0.002
"""Seconds that a message between two hosts takes."""
MOST_APART = 1000
"""Most ranks that see the end of a connection one by one."""
CLOSED = "the connection was closed by a peer"

Then = Callable[[Any], None]
"""Takes what an operation gives, or the error that it raises."""


class Rank(Protocol):
    """A worker, as the others see it."""

    rank: int
    host: int
    process: Process
    agent: Agent


class Work:
    """An operation of a rank's engine: what it gives, or the error that it ends with."""

    def __init__(self, gathering: int | None = None) -> None:
        self.gathering = gathering
        """Its number among all gatherings, if it is one."""
        self.lanes: Sequence[Any] = ()
        self.error: CommError | None = None
        self.done = False
        self.waiting: list[Wait] = []

    def end(self, given: Any) -> None:
        """It is over, with what each rank has given or with an error."""
        self.done = True
        if isinstance(given, CommError):
            self.error = given
        else:
            self.lanes = given
        for each in self.waiting:
            each.give()

    def wait(self, timeout: float) -> None:
        """Raise its error, or CommTimeout if it is not over."""
        if self.error is not None:
            raise self.error
        if not self.done:
            raise CommTimeout("it is under way")


class Operation:
    """The n-th operation of all ranks of a connection."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[int, Any] = {}
        self.given: Sequence[Any] = ()
        """What it gives to each rank, once it is done."""
        self.done = False


class Connection:
    """The ranks of one generation, connected with each other. Once it has failed for a rank, it does so for good."""

    def __init__(self, world: World, network: Network, generation: int, size: int, done: Callable[..., None]) -> None:
        """done: called with each operation that all ranks have come to."""
        self._world, self._network, self.generation, self._size = world, network, generation, size
        self.ranks: dict[int, Rank] = {}
        self._done = done
        self._operations: list[Operation] = []
        self._begun: dict[int, int] = {}
        """Rank to the number of operations that it has begun."""
        self._waits: dict[int, list[tuple[Operation, Then]]] = {}
        """Rank to the operations that it has begun, and that have not ended for it."""
        self._errors: dict[int, CommError] = {}
        self._left: set[int] = set()
        self._messages: dict[int, Any] = {}
        """What was sent to a rank that has not asked for it yet."""
        self._receives: dict[int, Then] = {}
        self.is_broken = False
        """Whether a rank has left in the midst of it, so that no operation can end that needs it."""
        network.changed.append(self.settle)

    def join(self, worker: Rank) -> None:
        self.ranks[worker.rank] = worker

    def failed(self, rank: int) -> bool:
        """Whether it has failed for this rank."""
        return rank in self._errors

    def begin(self, rank: int, name: str, value: Any, then: Then) -> None:
        """Begin the next operation of this rank."""
        if rank in self._errors:
            then(self._errors[rank])
            return
        number = self._begun[rank] = self._begun.get(rank, 0) + 1
        if number > len(self._operations):
            self._operations.append(Operation(name))
        operation = self._operations[number - 1]
        self._waits.setdefault(rank, []).append((operation, then))
        if operation.name != name:
            text = f"rank {rank} is in {name}, rank {next(iter(operation.values))} in {operation.name}"
            for each in [rank, *operation.values]:
                self._fail(each, Mismatch(f"{text}: the ranks do not run the same steps"))
            return
        operation.values[rank] = value
        self._settle(operation)

    def send(self, rank: int, value: Any) -> None:
        """Send a message to one other rank."""
        self._world.after(self._world.spread(LATENCY), lambda: self._arrive(rank, value))

    def _arrive(self, rank: int, value: Any) -> None:
        self._messages[rank] = value
        if (then := self._receives.pop(rank, None)) is not None:
            then(self._messages.pop(rank))

    def receive(self, rank: int, then: Then) -> None:
        """Receive the message to this rank."""
        if rank in self._errors:
            then(self._errors[rank])
        elif rank in self._messages:
            then(self._messages.pop(rank))
        else:
            self._receives[rank] = then

    def settle(self) -> None:
        """End the operations to which all ranks have come, where their data go through."""
        for operation in {id(each): each for waits in self._waits.values() for each, _ in waits}.values():
            self._settle(operation)

    def _settle(self, operation: Operation) -> None:
        if operation.done or len(operation.values) < self._size or not self._goes_through():
            return
        operation.done = True
        operation.given = [operation.values[rank] for rank in sorted(operation.values)]
        self._done(self, operation)
        slow = max((self._network.slow.get(each.host, 0.0) for each in self.ranks.values()), default=0.0)
        for rank in operation.values:
            self._world.after(self._world.spread(LATENCY) + slow, self._end(rank, operation))

    def _end(self, rank: int, operation: Operation) -> Callable[[], None]:
        def end() -> None:
            waits = self._waits.get(rank, [])
            while any(each is operation for each, _ in waits):  # those before it end before it
                earlier, then = waits.pop(0)
                then(earlier.given)

        return end

    def _goes_through(self) -> bool:
        if self.is_broken or not all(
            worker.process.runs or worker.rank in self._left for worker in self.ranks.values()
        ):
            return False
        hosts = {worker.host for worker in self.ranks.values()}
        return self._network.whole or all(self._network.reaches(a, b) for a in hosts for b in hosts if a != b)

    def abort(self, rank: int, error: CommError) -> None:
        """This rank gives up: all that it waits for fails, and the others see its connection closed."""
        self._fail(rank, error)
        self.leave(rank)

    def leave(self, rank: int, *, silent: bool = False, gentle: bool = False) -> None:
        """This rank is gone. silent: with its machine, so that the others do not see it. gentle: all that it has sent
        still comes."""
        if rank in self._left or rank not in self.ranks:
            return
        self._left.add(rank)
        self.is_broken = self.is_broken or not gentle
        self._errors.setdefault(rank, CommError(CLOSED))
        if not silent:
            self._world.after(LATENCY / 2, lambda: self._notice_all(self.ranks[rank].host, gentle=gentle))

    def _notice_all(self, host: int, *, gentle: bool) -> None:
        """Those that are still there see that a rank of this host has left."""
        others = [self.ranks[rank] for rank in self.ranks.keys() - self._left]
        for other in others:
            if not self._network.joined(other.host, host):
                continue
            notice = self._notice(other, gentle=gentle)
            if len(others) > MOST_APART:
                notice()
            else:
                self._world.after(LATENCY * self._world.random.random(), notice)

    def _notice(self, other: Rank, *, gentle: bool) -> Callable[[], None]:
        def notice() -> None:
            done = any(operation.done for operation, _ in self._waits.get(other.rank, ()))
            if other.rank not in self._left and not (done and (gentle or self._world.random.random() < 0.5)):
                other.process.get(lambda: self._fail(other.rank, CommError(CLOSED)))

        return notice

    def _fail(self, rank: int, error: CommError) -> None:
        self._errors.setdefault(rank, error)
        waits = [then for _, then in self._waits.pop(rank, ())]
        for then in [*waits, *([self._receives.pop(rank)] if rank in self._receives else [])]:
            then(error)


class Connections:
    """All connections of a job, each for those that have met at the launcher with the same words."""

    def __init__(self, world: World, network: Network, done: Callable[..., None]) -> None:
        self._world, self._network, self._done = world, network, done
        self._all: dict[tuple[int, bytes], Connection] = {}

    def join(self, worker: Rank, generation: int, met: Sequence[bytes]) -> Connection:
        """Connect this worker with those that it has met."""
        key = generation, b" ".join(met)
        if key not in self._all:
            self._all[key] = Connection(self._world, self._network, generation, len(met), self._done)
        self._all[key].join(worker)
        return self._all[key]


def mixed(weights: int, step: int, ranks: Sequence[int]) -> int:
    """Weights after a step of these ranks: a number that differs wherever anything has."""
    return hash((weights, step, tuple(sorted(ranks))))
