"""The files of a snapshot, from which a job goes on: whole, or not there.

<the job's folder>/snapshots/000000000120/     after that many optimizer steps
    rank0.pt       what is rank 0's, and for the first rank of a host what all ranks have in common; of lost ranks
                   there are no parts
    rank0.json     its length and its checksum, and a digest of what came to the first training forward after it:
                   the snapshot is not whole before
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from dadt.control import private_files, schema
from dadt.control.schema import MOST_RANKS
from dadt.errors import NotResumed

VERSION = 2
KEPT = 2
"""Number of whole snapshots that are kept. Training goes on from the last one."""
FOLDER = "snapshots"
_BLOCK = 1 << 20
_SYNCED = 32 << 20
"""Bytes written after which the disk is waited for."""
_LARGEST = 16 << 20
"""Most bytes of a part's description of the job, whose largest piece is the arguments of the script."""
_PART = re.compile(r"rank(\d{1,7})")


def folder_of(root: Path, step: int) -> Path:
    return root / f"{step:012d}"


def content_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"


class Content:
    """A file that a rank's content is written to. Its checksum is computed on the way, and what is on disk leaves the
    memory of the operating system, which the files of the training need: nobody reads it soon."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hash = file, hashlib.sha256()
        self._size = self._synced = 0

    def write(self, data: Any) -> int:
        """Write all of the data. Raises OSError."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._file.write(view)
        self._size += len(view)
        if self._size - self._synced >= _SYNCED:
            self.sync()
        return len(view)

    def flush(self) -> None:
        """Flush the file, as torch wants it. Raises OSError."""
        self._file.flush()

    def sync(self) -> None:
        """Return once all of it is on disk. Raises OSError."""
        self._file.flush()
        os.fsync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), self._synced, 0, os.POSIX_FADV_DONTNEED)
        self._synced = self._size

    @property
    def sha256(self) -> str:
        """The checksum, in hexadecimal digits, of what has been written so far."""
        return self._hash.hexdigest()


def complete(folder: Path, rank: int, half: Path, sha256: str, told: dict[str, Any]) -> None:
    """`half` is the rank's content, on disk, with this checksum: from now on it is part of the snapshot. Raises
    OSError."""
    about = {"version": VERSION, "size": half.stat().st_size, "sha256": sha256, **told}
    half.rename(content_of(folder, rank))
    write(folder / f"rank{rank}.json", json.dumps(about))


def write(path: Path, text: str) -> None:
    """Write the whole file, or none. Raises OSError."""
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
    """What the rank's part of a snapshot says of the job. Raises NotResumed if the part is not whole, as far as its
    length says, or something is missing or of another kind."""
    path = folder / f"rank{rank}.json"
    try:
        if not _is_file(path) or path.stat().st_size > _LARGEST:
            raise ValueError(path)
        told = json.loads(path.read_text())
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
    return dict(told)


def _is_file(path: Path) -> bool:
    """Whether it is a regular file: reading a pipe would wait."""
    return stat.S_ISREG(path.stat().st_mode)


def _are_ranks(value: Any) -> bool:
    return schema.listed(schema.whole(0, MOST_RANKS), MOST_RANKS)(value) and 0 < len(value) == len({*value})


_TEXT = schema.text(_LARGEST)
ABOUT: Mapping[str, schema.Check] = {
    "sha256": _TEXT,
    "step": schema.whole(),
    "seed": schema.whole(),
    "began": schema.number,
    "members": _are_ranks,
    "shares": schema.whole(1, MOST_RANKS),
    "world": schema.whole(1, MOST_RANKS),
    "common": schema.flag,
    "script": _TEXT,
    "arguments": schema.listed(_TEXT, _LARGEST),
    "next": _TEXT,
}
"""What a part has to say of the job, with a check for each value; it may say more."""


def parts(folder: Path) -> list[int]:
    """The ranks whose parts this host sees. Raises NotResumed if there is none."""
    names = [_PART.fullmatch(path.stem) for path in folder.glob("rank*.json")]
    found = sorted({int(name[1]) for name in names if name is not None})
    if not found:
        raise NotResumed(f"{folder}: has no whole part: resume from another one")
    return found


def told(folder: Path) -> dict[str, Any]:
    """What the first part says of the job. Raises NotResumed."""
    return about(folder, parts(folder)[0])


def shares(folder: Path) -> int:
    """Number of workers among which the job's data was divided; 1 if that cannot be read."""
    try:
        return int(told(folder)["shares"])
    except (NotResumed, KeyError, TypeError, ValueError):
        return 1


def is_whole(folder: Path) -> bool:
    """Whether all ranks that trained then have written their parts."""
    try:
        return all(about(folder, rank) for rank in told(folder)["members"])
    except NotResumed:
        return False


def whole(root: Path) -> list[Path]:
    """The folders of the whole snapshots, in order of steps."""
    return [folder for folder in sorted(root.glob("[0-9]*")) if is_whole(folder)]


def newest(root: Path) -> Path | None:
    """The folder of the last whole snapshot, whose step is the largest, as earlier attempts' were set aside; None if
    there is none."""
    return next((folder for folder in sorted(root.glob("[0-9]*"), reverse=True) if is_whole(folder)), None)


def drop_old(root: Path) -> None:
    """Remove all whole snapshots but the last KEPT; those that are not whole may become so and stay."""
    for folder in whole(root)[:-KEPT]:
        shutil.rmtree(folder, ignore_errors=True)


def set_aside(root: Path, last: Path | None, attempt: int) -> None:
    """Before an attempt that goes on from `last`, or from none: what it writes is not to meet others' of the same
    step. Those that came after the last whole one go, and where none is gone on from, all get another name."""
    if last is not None:
        for folder in root.glob("[0-9]*"):
            if folder.name > last.name:
                shutil.rmtree(folder, ignore_errors=True)
    elif root.exists():
        root.rename(root.with_name(f"{root.name}.{attempt - 1}"))


def digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()
