"""Ranks that exchange tensors with each other and with nobody else: all of a job, or those that the script names."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from dadt.comm import executors
from dadt.comm.collectives.named import Named
from dadt.comm.collectives.operation import Operation
from dadt.errors import CommError, DadtError

if TYPE_CHECKING:
    from dadt.comm.executors.base import PointToPoint
    from dadt.comm.executors.meet import Meet
    from dadt.comm.peer_deaths import Deaths
    from dadt.config import Config
    from dadt.world import World

T = TypeVar("T")


class Waited(Protocol):
    """An operation that a Handle waits for."""

    @property
    def done(self) -> bool: ...
    def wait(self, timeout: float) -> Any: ...


class Handle(Generic[T]):
    """A pending operation. `wait` returns its result, any number of times and in any thread. Do not change its tensors
    until then."""

    def __init__(self, owner: ProcessSet, waited: Waited, finish: Callable[[Any], Any] | None = None) -> None:
        self._owner = owner
        self._waited = waited
        self._finish = finish
        self._result: T
        self._finished = False
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether `wait` would not block."""
        return self._finished or self._waited.done

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the result, which is what the operation without `_async` returns.

        timeout: seconds to wait; by default those of `--timeout`. Raises CommTimeout after that (the operation still
        runs), and another CommError if the calls of the ranks do not match or a rank is lost.
        """
        if not self._finished:
            with self._owner.naming_ranks():
                result = self._waited.wait(self._owner.timeout if timeout is None else timeout)
            with self._lock:
                if not self._finished:
                    self._result = self._finish(result) if self._finish is not None else result
                    self._finished = True
                    self._finish = None
        return self._result


class Handles:
    """Several handles as one: `wait` gives the list of their results."""

    def __init__(self, handles: Sequence[Handle[Any]]) -> None:
        self._handles = handles

    @property
    def done(self) -> bool:
        """Whether `wait` would not block."""
        return all(handle.done for handle in self._handles)

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Wait for each handle, as Handle.wait does. Returns the list of their results."""
        return [handle.wait(timeout) for handle in self._handles]


class ProcessSet:
    """Some ranks of the job with their own connection, made by `dadt.add_process_set`."""

    def __init__(
        self,
        ranks: Sequence[int],
        world: World | None,
        config: Config,
        meet: Meet,
        deaths: Deaths,
        dump: Callable[[], None] | None,
    ) -> None:
        """world: this rank's place among `ranks`; None where it is none of them. dump: writes the stacks of all ranks
        of the job, where that can be."""
        self.ranks = tuple(ranks)
        """Ranks of the job, ascending: the set's rank 0 is the first."""
        self.timeout = config.timeout
        self.deaths = deaths
        self.proved = len(ranks) == 1 or bool(meet.secret)
        """Whether its ranks have proved to each other that they belong to this job."""
        self._calls = itertools.count(1)
        self._joins = 0
        self._lock = threading.Lock()
        self._world = world
        self._named: Named | None = None
        if world is not None:
            self._named = Named(executors.connect(config, world, meet), config, world, meet, dump)
            self.deaths.watch(self._named.abort)

    @property
    def included(self) -> bool:
        """Whether this rank is in the set."""
        return self._world is not None

    @property
    def size(self) -> int:
        """Number of ranks in the set."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """Number of this rank within the set. Raises DadtError if it is not in the set."""
        return self.named.rank

    @property
    def named(self) -> Named:
        """The connection for its tensors. Raises DadtError if this rank is not in the set, or the set is closed."""
        if self._world is None:
            raise DadtError(f"this rank is not in {self}: only its ranks may call verbs on it")
        if self._named is None:
            raise DadtError(f"{self} is closed: no verb can be called after dadt.shutdown()")
        return self._named

    @property
    def mail(self) -> PointToPoint:
        """Messages between two of its ranks."""
        return self.named.mail

    def number_of(self, rank: int, what: str) -> int:
        """Within the set, of a rank of the job. Raises ValueError where it is none of them."""
        if rank not in self.ranks:
            raise ValueError(f"{what} {rank} is not among the ranks of {self}")
        return self.ranks.index(rank)

    def name(self, given: str | None) -> str:
        """The given name, or the next of its own: calls without a name come in the same order on all ranks."""
        if given is not None:
            return given
        with self._lock:
            call = f"call {next(self._calls)}"
            return f"{call} after join {self._joins}" if self._joins else call

    def joined(self) -> None:
        """Call this when all ranks have joined. It restarts the numbering of calls without a name, as some ranks may
        have made more of them than others."""
        with self._lock:
            self._calls = itertools.count(1)
            self._joins += 1

    def submit(
        self,
        call: Operation,
        name: str | None,
        finish: Callable[[Any], Any] | None = None,
        group: str = "",
        group_size: int = 0,
    ) -> Handle[Any]:
        """Start the verb; does not block. Raises ValueError if a verb of that name is under way on this rank."""
        return Handle(self, self.named.submit(call, self.name(name), group, group_size), finish)

    def naming_ranks(self) -> _NamingRanks:
        """Errors raised within say which ranks they count."""
        return _NamingRanks(self)

    def close(self, timeout: float, reason: str = "") -> None:
        """Wait for what is pending, or, with a reason, fail it on all ranks; then end. Idempotent."""
        named, self._named = self._named, None
        if named is not None:
            self.deaths.forget(named.abort)
            if reason:
                named.abort(reason)
            named.close(timeout)

    def __repr__(self) -> str:
        return f"ProcessSet({list(self.ranks)})"


class _NamingRanks:
    """The core counts the ranks of a set from 0."""

    __slots__ = ("_owner",)

    def __init__(self, owner: ProcessSet) -> None:
        self._owner = owner

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ranks, deaths = self._owner.ranks, self._owner.deaths
        if not isinstance(error, CommError) or str(error) == deaths.text:
            return
        deaths.name(error)
        if ranks[-1] != len(ranks) - 1:
            raise type(error)(f"{error} (ranks counted within {self._owner})") from None
