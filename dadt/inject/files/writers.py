"""Decides which rank writes a path, for all code that writes, renames or removes files.

A script that does not know of other ranks writes the same paths on all of them. In this case the first rank of the host
writes the real files, and each other rank writes private copies. Once the script has read its rank, files that only
another rank writes become real files, too. A script with a process group, or that calls `dadt.init`, is left alone;
where each island has a process group of its own, the ranks of all islands except the first write private copies, which
an island's ranks on a host share. Hosts that share the working folder count as one host for the files in it.
"""

from __future__ import annotations

from enum import Enum, auto
from pathlib import Path

from dadt.train.runtime import Runtime


class Mode(Enum):
    """How the ranks of a host write their files."""

    REPLAY = auto()
    """The script runs again up to a snapshot, and has already written all its files before."""
    ONE = auto()
    """The script does not know that there are other ranks."""
    SHARED = auto()
    """The script has read its rank, and may write different files on each."""
    ALL = auto()
    """All ranks write real files, as `--files all` demands."""
    SCRIPT = auto()
    """The script has a process group and knows its rank, or calls `dadt.init`."""
    COPY = auto()
    """The script has a process group on each island, and this rank's island writes the same files as the first
    island."""


class WriteRole(Enum):
    """How a rank writes a path: the real file, or a private copy."""

    FOR_GOOD = auto()
    APART = auto()
    """The rank writes a private copy, which no other rank sees."""
    UNTIL_CLOSED = auto()
    """The rank writes a private copy, which becomes the real file when it is closed, unless the first rank writes this
    file."""


def decide(mode: Mode, *, first: bool, copy: bool, begins: bool = False) -> WriteRole:
    """Return how a rank writes a path. first: this rank is the first of its host. copy: this rank has a private copy of
    the path, or has removed the path privately. begins: the file is written from its beginning, completely, by Python's
    `open`.
    """
    if mode in (Mode.REPLAY, Mode.COPY):
        return WriteRole.APART
    if first and not copy:
        return WriteRole.FOR_GOOD
    if mode in (Mode.SHARED, Mode.ALL):
        if begins:
            return WriteRole.UNTIL_CLOSED
        return WriteRole.APART if copy and mode is Mode.SHARED else WriteRole.FOR_GOOD
    return WriteRole.APART if copy or mode is Mode.ONE else WriteRole.FOR_GOOD


class Writers:
    """Decides for one rank which paths it writes as real files, not as private copies."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._first = runtime.ranks.first
        """Whether this rank is the first of its host. Stored, so that a forked child knows it, too."""
        self._rank = runtime.ranks.world.rank
        self._folder = f"{Path.cwd()}/"

    def is_first(self, path: str) -> bool:
        """Return whether this rank is the first of all ranks that can see this absolute path."""
        return self._first_of_all if self.is_far(path) else self._first

    def is_far(self, path: str) -> bool:
        """Return whether ranks of several hosts can see the path, because it is in a working folder that these hosts
        share."""
        return self._runtime.ranks.folder_writer >= 0 and path.startswith(self._folder)

    @property
    def writer(self) -> int:
        """The rank that writes real files in a working folder shared by several hosts."""
        return self._runtime.ranks.folder_writer

    @property
    def _first_of_all(self) -> bool:
        return self._first and self.writer in (-1, self._rank)

    @property
    def _is_of_first_island(self) -> bool:
        """Whether this rank's island is the first of the host, or of the hosts that share the working folder."""
        world, writer = self._runtime.ranks.world, self.writer
        size = world.island_size or world.world_size
        if writer >= 0:
            return writer // size == world.rank // size
        firsts = self._runtime.ranks.newest.firsts
        return any(rank // size == world.island for rank in firsts) if firsts else world.local_rank < size

    def take_over(self) -> bool:
        """Called when ranks were lost, on the rank that is the first of its host now. Return whether it is also the
        first of all hosts that share the working folder."""
        self._first = True
        return self._first_of_all

    @property
    def mode(self) -> Mode:
        runtime = self._runtime
        if runtime.replay.under_way:
            return Mode.REPLAY
        if runtime.script.is_distributed:
            return Mode.SCRIPT if self._is_of_first_island else Mode.COPY
        if runtime.ranks.config.files == "all":
            return Mode.ALL
        return Mode.SHARED if runtime.script.knows_rank else Mode.ONE

    @property
    def copies(self) -> bool:
        """Whether this rank's island writes private copies of the files that the first island writes."""
        return self.mode is Mode.COPY

    @property
    def counts_for_island(self) -> bool:
        """Whether this rank is the first of its island on this host."""
        world = self._runtime.ranks.world
        return world.local_rank == 0 or world.rank == world.island * world.island_size

    def role(self, path: str, *, copy: bool, begins: bool = False) -> WriteRole:
        """Return how this rank writes an absolute path. copy: this rank has a private copy of the path, or has removed
        the path privately. begins: the file is written from its beginning, completely, by Python's `open`."""
        return decide(self.mode, first=self.is_first(path), copy=copy, begins=begins)

    @property
    def is_apart(self) -> bool:
        """Whether this rank writes only private copies in the working folder."""
        return self.mode in (Mode.REPLAY, Mode.COPY) or (self.mode is Mode.ONE and not self._first_of_all)

    @property
    def is_shared(self) -> bool:
        """Whether several ranks of the host write real files, possibly to the same path."""
        return self.mode in (Mode.SHARED, Mode.ALL)

    @property
    def saves_once(self) -> bool:
        """Whether a rank does not save a complete file itself if the first rank saves the same file."""
        return self._runtime.ranks.config.save_once and self.mode in (Mode.ONE, Mode.SHARED)

    def puts_in_place(self, by_first: bool) -> bool:
        """Return whether a file that was written privately until it was closed becomes the real file. by_first: whether
        another rank has written the real file."""
        return self.mode not in (Mode.SHARED, Mode.COPY) or not by_first

    @property
    def reads_apart(self) -> bool:
        """Whether this rank may have private copies to read."""
        return not self._first_of_all or self.mode in (Mode.REPLAY, Mode.COPY)
