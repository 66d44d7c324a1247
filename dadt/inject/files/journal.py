"""A journal of the real files that the ranks of a host have written: a file to which every rank appends, and which
every rank reads."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

# Imported by name, because DADT later replaces these functions in the module `os`.
from os import lstat
from os import open as os_open
from pathlib import Path

from dadt.control.written_files import REMOVED, line
from dadt.errors import CommTimeout

PAUSE_SECONDS = 0.005
PATIENCE_SECONDS = 2.0
"""Seconds between a rank's reports that it still waits for its turn to change a file."""


class WrittenJournal:
    """The record of the real files that the ranks of a host have written. Paths are absolute. A size is in bytes;
    special values stand for a missing and a removed file."""

    def __init__(
        self,
        file: Path,
        rank: int,
        timeout: float = 60.0,
        relay: Callable[[str, int], bool] = lambda path, size: False,
        hear: Callable[[], Sequence[bytes]] | None = None,
        tell: Callable[[str, float], None] = lambda what, waited: None,
    ) -> None:
        """timeout: seconds that a rank waits for its turn. relay: sends a report to the ranks of other hosts, and
        returns whether it was sent. hear: returns the reports relayed since its last call, including those of this
        rank; None if the agent writes reports of other hosts to the journal's file. tell: reports that the rank waits
        for its turn, and for how many seconds.
        """
        self._relay, self._hear, self._tell_waiting = relay, hear, tell
        self.rank = rank
        self._timeout = timeout
        self._file = os_open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._read = 0
        self._writer: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._removals: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._gone: dict[str, int] = {}
        self._changed: set[str] = set()
        self._mine: set[str] = set()
        self._taken: dict[str, bool] = {}
        """For each path that this rank has written, whether another rank has removed it since."""

    def wrote(self, path: str, *, new: bool = False) -> None:
        """Record that this rank is about to write the file, or has made the folder. new: nothing existed at the path
        before."""
        if path in self._mine and self.writer(path) in (None, self.rank) and path not in self._gone:
            return
        self._mine.add(path)
        self._tell(-1 if new else size_of(path), path)

    def takes_part(self, path: str) -> None:
        """Count this rank, too, as a writer of a file that another rank has written."""
        self._look()
        self._taken[path] = False

    def removed(self, path: str) -> None:
        """Record that this rank has removed the path, or renamed it to another."""
        self._mine.discard(path)
        self._tell(REMOVED, path)

    def writer(self, path: str) -> int | None:
        """Return the rank that last wrote the real file at this path; None if no rank has written it since the job
        began."""
        self._look()
        return self._writer.get(path)

    def is_others(self, path: str) -> bool:
        """Whether another rank was the last to write the path."""
        return self.writer(path) not in (None, self.rank)

    def before(self, path: str) -> int | None:
        """Return the file's size in bytes before another rank began to write it; -1 if there was no file, None if no
        other rank has written it."""
        self._look()
        return self._before.get(path)

    def removals(self, path: str) -> int:
        """Return the largest number of times that any other rank has removed the path."""
        self._look()
        return max((n for rank, n in self._removals[path].items() if rank != self.rank), default=0)

    def is_taken(self, path: str) -> bool | None:
        """Return whether another rank has removed the path since this rank wrote it; None if this rank has never
        written it."""
        self._look()
        return self._taken.get(path)

    def is_gone(self, path: str) -> bool:
        """Whether another rank has removed the path, and no rank has written it since."""
        self._look()
        return self._gone.get(path, self.rank) != self.rank

    def is_changed(self, folder: str) -> bool:
        """Whether another rank has written or removed a file in the folder, not counting folders in it."""
        self._look()
        return folder in self._changed

    def written_by_others(self) -> set[str]:
        self._look()
        return {path for path, rank in self._writer.items() if rank != self.rank}

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A context that only one rank of the host can be in at a time. Raises CommTimeout if another rank does not
        leave it in time."""
        # Opened again, because a forked child needs a lock of its own. Opened by descriptor, because a program that
        # cleans up old files may have removed the name.
        file = os_open(f"/proc/self/fd/{self._file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            begun, told = time.monotonic(), 0.0
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if (waited := time.monotonic() - begun) >= self._timeout:
                    raise CommTimeout(
                        f"rank {self.rank} waited {waited:.0f} s to change a file, as {_holder(file)}, another rank of"
                        " this host, is changing one: it is stopped, or the file system does not answer"
                    )
                if waited >= told + PATIENCE_SECONDS:
                    told = waited
                    self._tell_waiting("changing a file", waited)
                time.sleep(PAUSE_SECONDS)
            yield
        finally:
            os.close(file)

    def _tell(self, size: int, path: str) -> None:
        if self._hear is not None and self._relay(path, size):
            # Not written to the file, since the relay also reports the line to this host, in an order that is the same
            # on all ranks.
            return
        os.write(self._file, line(self.rank, size, path))
        if self._hear is None:
            self._relay(path, size)

    def _look(self) -> None:
        """Read the lines that ranks have added to the journal since the last call of this method."""
        more = os.fstat(self._file).st_size - self._read
        data = os.pread(self._file, more, self._read) if more > 0 else b""
        data = data[: data.rfind(b"\n") + 1]
        self._read += len(data)
        for each in (*data.splitlines(), *(self._hear() if self._hear is not None else ())):
            rank, size, path = json.loads(each)
            if rank != self.rank:
                self._changed.add(path.rpartition(os.sep)[0])
            if size == REMOVED:
                self._removals[path][rank] += 1
                self._gone[path] = rank
                if rank != self.rank and path in self._taken:
                    self._taken[path] = True
                continue
            self._gone.pop(path, None)
            self._writer[path] = rank
            if rank == self.rank:
                self._taken[path] = False
            else:
                self._before.setdefault(path, size)


def _holder(file: int) -> str:
    """Return the process that has locked the file, according to the kernel, as text for an error."""
    inode, listed = os.fstat(file).st_ino, ""
    with suppress(OSError):  # in a sandbox, /proc/locks may not be readable
        listed = Path("/proc/locks").read_text()
    for each in listed.splitlines():
        _, kind, *_, pid, place, _, _ = each.split()
        if kind == "FLOCK" and place.endswith(f":{inode}"):
            return f"process {pid}"
    return "a process"


def size_of(path: str) -> int:
    """Return the size in bytes of the file or folder at the path; -1 if nothing is there."""
    try:
        return lstat(path).st_size
    except OSError:
        return -1
