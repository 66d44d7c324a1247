"""Who writes a path: the one decision that everything asks that writes, renames or removes files.

A script that believes it is alone writes the same paths on all ranks. Then the first rank of the host writes them for
good, and each of the others a copy, which nobody else sees. Once the script has read its rank, the first one's files
are still its own, and what another rank alone writes is there, too. With a process group or `dadt.init` the script
knows what it does. Hosts that see the same working folder are as one host there.
"""

from __future__ import annotations

from enum import Enum, auto
from pathlib import Path

from dadt.train.runtime import Runtime


class Mode(Enum):
    """What the ranks of a host do with their files."""

    REPLAY = auto()
    """The script runs again up to a snapshot, so it has written all this before."""
    ONE = auto()
    """The script believes that it is alone."""
    SHARED = auto()
    """The script has read its rank."""
    ALL = auto()
    """All ranks write, as `--files all` says."""
    SCRIPT = auto()
    """The script has a process group and knows its rank, or calls `dadt.init`."""


class WriteRole(Enum):
    """What a rank does with a path that it is about to write."""

    FOR_GOOD = auto()
    APART = auto()
    """It writes a copy, which no other rank sees."""
    UNTIL_CLOSED = auto()
    """It writes a copy, which becomes the file itself when it is closed, unless that is the first rank's."""


def decide(mode: Mode, *, first: bool, copy: bool, begins: bool = False) -> WriteRole:
    """copy: this rank sees a copy of its own there, or has removed what others see. begins: the file gets a new
    content, by Python's `open`, and whole."""
    if mode is Mode.REPLAY:
        return WriteRole.APART
    if first and not copy:
        return WriteRole.FOR_GOOD
    if mode in (Mode.SHARED, Mode.ALL):
        if begins:
            return WriteRole.UNTIL_CLOSED
        return WriteRole.APART if copy and mode is Mode.SHARED else WriteRole.FOR_GOOD
    return WriteRole.APART if copy or mode is Mode.ONE else WriteRole.FOR_GOOD


class Writers:
    """The decision for this rank."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._first = runtime.ranks.first
        """This rank is the first of its host. A forked child keeps it."""
        self._rank = runtime.ranks.world.rank
        self._folder = f"{Path.cwd()}/"

    def is_first(self, path: str) -> bool:
        """Whether this rank is the first of those that see this absolute path."""
        return self._first_of_all if self.is_far(path) else self._first

    def is_far(self, path: str) -> bool:
        """Whether ranks of several hosts see it."""
        return self._runtime.ranks.folder_writer >= 0 and path.startswith(self._folder)

    @property
    def writer(self) -> int:
        """The rank that writes for good in a folder that several hosts see."""
        return self._runtime.ranks.folder_writer

    @property
    def _first_of_all(self) -> bool:
        return self._first and self.writer in (-1, self._rank)

    def take_over(self) -> bool:
        """Ranks were lost, and this one is the first of its host. Returns whether it is the first of all now, too."""
        self._first = True
        return self._first_of_all

    @property
    def mode(self) -> Mode:
        runtime = self._runtime
        if runtime.replay.under_way:
            return Mode.REPLAY
        if runtime.script.is_distributed:
            return Mode.SCRIPT
        if runtime.ranks.config.files == "all":
            return Mode.ALL
        return Mode.SHARED if runtime.script.knows_rank else Mode.ONE

    def role(self, path: str, *, copy: bool, begins: bool = False) -> WriteRole:
        """What this rank does with an absolute path that it is about to write. copy, begins: as of `decide`."""
        return decide(self.mode, first=self.is_first(path), copy=copy, begins=begins)

    @property
    def is_apart(self) -> bool:
        """Whether this rank writes nothing for good, in the working folder."""
        return self.mode is Mode.REPLAY or (self.mode is Mode.ONE and not self._first_of_all)

    @property
    def is_shared(self) -> bool:
        """Several ranks of the host write for good, and may write the same path."""
        return self.mode in (Mode.SHARED, Mode.ALL)

    @property
    def saves_once(self) -> bool:
        """A rank that saves a whole file to a path lets the first one do it, if that one does."""
        return self._runtime.ranks.config.save_once and self.mode in (Mode.ONE, Mode.SHARED)

    def puts_in_place(self, by_first: bool) -> bool:
        """Whether a file that this rank has written until it was closed becomes the file itself. by_first: the first
        rank has written there."""
        return self.mode is not Mode.SHARED or not by_first

    @property
    def reads_apart(self) -> bool:
        """Whether this rank may have copies."""
        return not self._first_of_all or self.mode is Mode.REPLAY
