"""The files of a snapshot, from which a job resumes. An incomplete snapshot counts as missing.

<the job's folder>/snapshots/000000000120/     the snapshot after 120 optimizer steps
    rank0.pt       content of rank 0; on the first rank of each host also what all ranks have in common. In a job with
                   islands, on each rank of the host's first island what the ranks at its place have in common. Ranks
                   that were lost have no part.
    rank0.json     length and checksum of rank0.pt, the attempt to run the job and the generation of ranks that took it,
                   and a digest of the input of the first training forward after the snapshot, which is therefore
                   complete only after this forward.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from dadt.control import private_files, schema, snapshot_parts
from dadt.control.schema import MOST_RANKS
from dadt.errors import NotResumed

VERSION = 2
FOLDER = "snapshots"
_BLOCK = 1 << 20
_SYNCED = 32 << 20
"""Number of bytes after which written data is synced to the disk."""
_LARGEST = 16 << 20
"""Size limit in bytes of the JSON description of a part. The largest value in it is the list of the script's arguments.
"""
_PART = re.compile(r"rank(\d{1,7})")


def folder_of(root: Path, step: int) -> Path:
    return root / f"{step:012d}"


def content_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"


class Content:
    """File to which one rank's content is written, with a checksum computed on the way. Written data is dropped from
    the operating system's cache, which is thus left to training data, since a snapshot is rarely read soon."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hash = file, hashlib.sha256()
        self._size = self._synced = 0

    def write(self, data: Any) -> int:
        """Write all of the data and return its number of bytes. Raises OSError."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._file.write(view)
        self._size += len(view)
        if self._size - self._synced >= _SYNCED:
            self.sync()
        return len(view)

    def flush(self) -> None:
        """Flush the file; torch.save requires this method. Raises OSError."""
        self._file.flush()

    def sync(self) -> None:
        """Wait until all data written so far is on disk. Raises OSError."""
        self._file.flush()
        os.fsync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), self._synced, 0, os.POSIX_FADV_DONTNEED)
        self._synced = self._size

    @property
    def sha256(self) -> str:
        """Checksum of the data written so far, in hexadecimal digits."""
        return self._hash.hexdigest()


def complete(folder: Path, rank: int, half: Path, sha256: str, told: dict[str, Any]) -> None:
    """Move `half`, a file with a rank's content and this checksum, into the snapshot as the rank's part, and write the
    part's description. told: further values for the description. Raises OSError."""
    about = {"version": VERSION, "size": half.stat().st_size, "sha256": sha256, **told}
    half.rename(content_of(folder, rank))
    write(folder / f"rank{rank}.json", json.dumps(about))


def write(path: Path, text: str) -> None:
    """Write a text file atomically, so that a crash leaves either the new content or the old one. Raises OSError."""
    half = path.with_suffix(f"{path.suffix}.half")
    try:
        with private_files.open_file(half, "w", inner=True) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        half.rename(path)
    finally:
        half.unlink(missing_ok=True)


def about(folder: Path, rank: int) -> dict[str, Any]:
    """Return the description of the job in a rank's part of a snapshot. Raises NotResumed if the part is incomplete
    (judged by its length), or if a value is missing or of the wrong type."""
    path = folder / f"rank{rank}.json"
    try:
        if not _is_file(path) or path.stat().st_size > _LARGEST:
            raise ValueError(path)
        told = {"attempt": 0, "generation": 0, "parts": 1, **json.loads(path.read_text())}
        version, size = told["version"], told["size"]
        found = content_of(folder, rank).stat().st_size if _is_file(content_of(folder, rank)) else -1
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise NotResumed(f"{folder}: the part of rank {rank} is not there, or torn: resume from another one") from None
    if version != VERSION:
        raise NotResumed(f"{folder}: was written by another version of DADT, and cannot be resumed with this one")
    if size != found:
        raise NotResumed(f"{folder}: the part of rank {rank} is torn: resume from another one")
    for name, kind in ABOUT.items():
        if name not in told or not kind(told[name]):
            what = "is not what belongs there" if name in told else "is missing"
            raise NotResumed(f"{path}: {name!r} {what}: resume from another snapshot")
    return told


def _is_file(path: Path) -> bool:
    """Return whether the path is a regular file. Other kinds are not opened, since opening a pipe, for example, would
    block."""
    return stat.S_ISREG(path.stat().st_mode)


def _are_ranks(value: Any) -> bool:
    return schema.listed(schema.whole(0, MOST_RANKS), MOST_RANKS)(value) and 0 < len(value) == len({*value})


_TEXT = schema.text(_LARGEST)
ABOUT: Mapping[str, schema.Check] = {
    "sha256": _TEXT,
    "step": schema.whole(),
    "seed": schema.whole(),
    "began": schema.number,
    "attempt": schema.whole(),
    "generation": schema.whole(),
    "members": _are_ranks,
    "shares": schema.whole(1, MOST_RANKS),
    "world": schema.whole(1, MOST_RANKS),
    "parts": schema.whole(1, MOST_RANKS),
    "common": schema.flag,
    "script": _TEXT,
    "arguments": schema.listed(_TEXT, _LARGEST),
    "next": _TEXT,
}
"""The values that a part's description must contain, each with a check; the description may contain further values."""


def parts(folder: Path) -> list[int]:
    """Return the ranks whose parts of the snapshot exist on this host. Raises NotResumed if there are none."""
    names = [_PART.fullmatch(path.stem) for path in folder.glob("rank*.json")]
    found = sorted({int(name[1]) for name in names if name is not None})
    if not found:
        raise NotResumed(f"{folder}: has no whole part: resume from another one")
    return found


def told(folder: Path) -> dict[str, Any]:
    """Return the description of the job in the snapshot's first part. Raises NotResumed if the part is incomplete."""
    return about(folder, parts(folder)[0])


def shares(folder: Path) -> int:
    """Return the number of workers among which the job that took the snapshot has divided its data; 1 if this cannot be
    read."""
    try:
        return int(told(folder)["shares"])
    except (NotResumed, KeyError, TypeError, ValueError):
        return 1


def described(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the descriptions, by rank, of the snapshot's parts that are complete and that this host sees."""
    found = {}
    with suppress(NotResumed):
        for rank in parts(folder):
            with suppress(NotResumed):
                found[rank] = about(folder, rank)
    return found


def is_whole(folder: Path) -> bool:
    return snapshot_parts.is_whole(described(folder))


def whole(root: Path) -> list[Path]:
    """Return the folders of the complete snapshots, in order of steps."""
    return [folder for folder in sorted(root.glob("[0-9]*")) if is_whole(folder)]


def newest(root: Path) -> Path | None:
    """Return the folder of the complete snapshot with the largest step, or None. Newer snapshots of earlier attempts do
    not exist here any more, since `set_aside` removes or moves them."""
    return next((folder for folder in sorted(root.glob("[0-9]*"), reverse=True) if is_whole(folder)), None)


def drop_old(root: Path) -> None:
    """Remove the complete snapshots that are not kept. Incomplete ones stay, since ranks may still be writing them."""
    for folder in snapshot_parts.outdated(whole(root)):
        shutil.rmtree(folder, ignore_errors=True)


def set_aside(root: Path, last: Path | None, attempt: int) -> None:
    """Prepare the folder for an attempt that resumes from snapshot `last`, or from none, so that its snapshots are not
    mixed with older ones of the same steps. Removes the snapshots newer than `last`; without `last`, renames the folder
    of all snapshots."""
    if last is not None:
        for folder in snapshot_parts.superseded(root.glob("[0-9]*"), last):
            shutil.rmtree(folder, ignore_errors=True)
    elif root.exists():
        root.rename(root.with_name(f"{root.name}.{attempt - 1}"))


def digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()
