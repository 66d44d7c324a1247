"""Process sets: all ranks of the job, or those that the script lists, which run collectives among themselves only."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from dadt.comm import executors
from dadt.comm.collectives.named import Named
from dadt.comm.collectives.operation import Operation
from dadt.comm.executors.base import PointToPoint
from dadt.comm.executors.meet import Meet
from dadt.comm.keepalive import Waited
from dadt.comm.link_totals import Links, renumbered
from dadt.comm.peer_deaths import Deaths
from dadt.config import Config
from dadt.errors import CommError, DadtError
from dadt.world import World

T = TypeVar("T")


class Handle(Generic[T]):
    """Handle of a pending operation. `wait` returns the result, any number of times and from any thread. Do not change
    the operation's tensors before `wait` has returned."""

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
        """Wait for the operation and return its result.

        timeout: seconds to wait, by default the value of `--timeout`. Raises CommTimeout after that time, while the
        operation continues to run, and another CommError if the ranks' calls do not match or a rank is lost.
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


class Handles(Handle[list[Any]]):
    """Several handles in one: `wait` returns the list of their results. It has no operation of its own."""

    def __init__(self, handles: Sequence[Handle[Any]]) -> None:
        self._handles = handles

    @property
    def done(self) -> bool:
        """Whether `wait` would not block."""
        return all(handle.done for handle in self._handles)

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Wait for every handle, each for `timeout` seconds, and return the list of their results."""
        return [handle.wait(timeout) for handle in self._handles]


class ProcessSet:
    """A set of the job's ranks with a connection of its own, created by `dadt.add_process_set`."""

    def __init__(
        self,
        ranks: Sequence[int],
        world: World | None,
        config: Config,
        meet: Meet,
        deaths: Deaths,
        dump: Callable[[], None] | None,
    ) -> None:
        """world: this rank's place within the set; None if this rank is not in it. dump: writes the stacks of all ranks
        of the job to files; None if not available."""
        self.ranks = tuple(ranks)
        """Global ranks of the members, ascending: the first is rank 0 within the set."""
        self.timeout = config.timeout
        self.deaths = deaths
        self.proved = len(ranks) == 1 or bool(meet.secret)
        """Whether the set's ranks have proved to each other, by a shared secret, that they belong to this job."""
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
        """Number of this rank within the set. Raises DadtError if this rank is not in it."""
        return self.named.rank

    @property
    def named(self) -> Named:
        """Connection for the set's named tensors. Raises DadtError if this rank is not in the set, or if the set is
        closed."""
        if self._world is None:
            raise DadtError(f"this rank is not in {self}: only its ranks may call verbs on it")
        if self._named is None:
            raise DadtError(f"{self} is closed: no verb can be called after dadt.shutdown()")
        return self._named

    @property
    def mail(self) -> PointToPoint:
        """Point-to-point messages between ranks of the set."""
        return self.named.mail

    @property
    def links(self) -> Links:
        """Function that returns the traffic with other hosts, by the ranks' numbers in the whole job."""
        return renumbered(self.named.connection.links, self.ranks)

    def number_of(self, rank: int, what: str) -> int:
        """Return the number within the set of global rank `rank`. what: describes the argument in the error. Raises
        ValueError if the rank is not in the set."""
        if rank not in self.ranks:
            raise ValueError(f"{what} {rank} is not among the ranks of {self}")
        return self.ranks.index(rank)

    def name(self, given: str | None) -> str:
        """Return `given`, or a generated name if it is None. Generated names are consecutive numbers, which are the
        same on all ranks because all make unnamed calls in the same order."""
        if given is not None:
            return given
        with self._lock:
            call = f"call {next(self._calls)}"
            return f"{call} after join {self._joins}" if self._joins else call

    def joined(self) -> None:
        """Restart the numbering of unnamed calls after all ranks have joined, since ranks may have made different
        numbers of them before."""
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
        """Start the operation without blocking. finish: converts the operation's result to the result of the handle.
        Raises ValueError if an operation of this name is pending on this rank."""
        return Handle(self, self.named.submit(call, self.name(name), group, group_size), finish)

    def submit_group(self, members: Sequence[tuple[Operation, Callable[[Any], Any] | None]], group: str) -> Handles:
        """Start operations, each with its `finish`, under numbered names that begin with `group`. Nothing moves before
        all ranks have submitted the whole group."""
        return Handles(
            [
                self.submit(call, f"{group}.{number}", finish, group, len(members))
                for number, (call, finish) in enumerate(members)
            ]
        )

    def naming_ranks(self) -> _NamingRanks:
        """Return a context manager that adds to errors raised in its body that ranks are counted within this set."""
        return _NamingRanks(self)

    def close(self, timeout: float, reason: str = "") -> None:
        """Wait for pending operations, or fail them on all ranks if a reason is given; then close the connection. May
        be called repeatedly."""
        named, self._named = self._named, None
        if named is not None:
            self.deaths.forget(named.abort)
            if reason:
                named.abort(reason)
            named.close(timeout)

    def __repr__(self) -> str:
        return f"ProcessSet({list(self.ranks)})"


class _NamingRanks:
    """Context manager that adds a note to errors on how ranks are counted, since the C++ core counts the ranks of a set
    from 0."""

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
