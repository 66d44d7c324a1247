"""Horovod's process sets: sets of ranks that exchange tensors among themselves."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from dadt.api import lifecycle
from dadt.comm.collectives import process_set as own
from dadt.frontends.horovod.errors import horovods
from dadt.frontends.horovod.torch import place


class ProcessSet:
    """Some ranks of the job. The set can be used once it was passed to `init(process_sets=...)` or
    `add_process_set`."""

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        """Raises ValueError if the argument is not a list of ranks, such as a communicator of mpi4py, which is not
        supported."""
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError("ProcessSet: give a list of ranks; communicators of mpi4py are not supported")
        ranks = list(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError("ProcessSet: give a list of ranks, which are whole numbers")
        self.ranks = sorted(ranks)
        self._own: own.ProcessSet | None = None

    @property
    def among(self) -> own.ProcessSet:
        """DADT's own process set of these ranks. Raises ValueError if the set was not added, or this process is not in
        the set."""
        if self.process_set_id is None or self._own is None:
            raise ValueError(f"{self} is not known: give it to hvd.init or hvd.add_process_set first")
        if not self._own.included:
            raise ValueError(f"rank {place.rank()} is not in {self}: only its ranks may use it")
        return self._own

    def size(self) -> int | None:
        """Return the number of ranks, or None before the set was added."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's number within the set, or None if it is not in the set or the set was not added."""
        if self.process_set_id is None or self.ranks is None or not self.included():
            return None
        return self.ranks.index(place.rank())

    def included(self) -> bool | None:
        """Return whether this process is in the set."""
        return None if self.ranks is None else place.rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"


class _Global(ProcessSet):
    """The set of all ranks, which exists without being added."""

    process_set_id = 0

    @property
    def among(self) -> own.ProcessSet:
        place.size()  # place.size() raises ValueError before `init`
        with horovods():
            return lifecycle.session().all


global_process_set: ProcessSet = _Global([])
_added: list[ProcessSet] = []
_ids = itertools.count(1)


def begin(process_sets: Sequence[ProcessSet]) -> None:
    """Add the process sets that `init` was called with. Raises ValueError for a duplicate."""
    global_process_set.ranks = list(range(place.size()))
    for number, each in enumerate(process_sets):
        try:
            add_process_set(each)
        except ValueError as error:
            raise ValueError(f"hvd.init: entry {number} of process_sets: {error}") from None


def end() -> None:
    """Close all process sets except the set of all ranks."""
    while _added:
        remove_process_set(_added[-1])


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a set of ranks, with a connection of its own. All ranks call this, in the same order.

    Raises ValueError if these ranks do not exist, or have a process set already.
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    assert made.ranks is not None
    if any(made.ranks == each.ranks for each in [global_process_set, *_added]):
        raise ValueError(f"there is a process set of ranks {made.ranks} already")
    with horovods():
        made._own = lifecycle.add_process_set(made.ranks)
    made._own.timeout = place.patience()
    made.process_set_id = next(_ids)
    _added.append(made)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Close a process set. Returns whether it was open. For the set of all ranks, does nothing and returns False."""
    if process_set not in _added:
        return False
    _added.remove(process_set)
    among, process_set._own, process_set.process_set_id = process_set._own, None, None
    assert among is not None
    with horovods():
        lifecycle.remove_process_set(among)
    return True
