"""Writes one rank's part of a snapshot, and reads it without executing any code in it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

# Imported by name, before DADT replaces `torch.save`, which shows true weights and makes private copies of files.
from torch import load, save

from dadt.control import private_files, snapshot_parts, snapshots
from dadt.errors import NotResumed
from dadt.inject.replay import base
from dadt.inject.replay.content import check as check_content
from dadt.inject.replay.content import check_archive
from dadt.inject.replay.values import ReadValues
from dadt.train.frozen import readable
from dadt.train.runtime import Runtime


def script() -> dict[str, Any]:
    """Return a hash of the script that this process runs, and the script's arguments, as both are recorded in a
    snapshot."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    text = Path(path).read_bytes() if path else b""
    return {"script": hashlib.sha256(text).hexdigest(), "arguments": sys.argv[1:]}


def check(told: dict[str, Any]) -> None:
    """Raise NotResumed if the snapshot was taken by another script, or with other arguments."""
    mine = script()
    if told["arguments"] != mine["arguments"]:
        were, now = (" ".join(each["arguments"]) or "none" for each in (told, mine))
        raise NotResumed(f"--resume: the script's arguments are {now}, and were {were}: give those, or --force")
    if told["script"] != mine["script"]:
        raise NotResumed(f"--resume: the script {sys.argv[0]} has changed since the snapshot: --force goes on with it")


def write(folder: Path, rank: int, content: dict[str, Any]) -> str:
    """Write a rank's part of a snapshot to a temporary file, and return its checksum. Only `complete` makes the file
    part of the snapshot. Raises OSError, or RuntimeError from torch."""
    base.make_folders(folder)
    try:
        with private_files.open_file(_half(folder, rank), inner=True) as file:
            written = snapshots.Content(file)
            save(content, written)  # type: ignore[arg-type]  # all that torch asks for is `write`
            written.sync()
    except BaseException:
        discard(folder, rank)
        raise
    return written.sha256


def complete(folder: Path, rank: int, sha256: str, told: dict[str, Any]) -> None:
    """Make the written file, with this checksum, part of the snapshot. told: facts about the job that the snapshot
    records. Raises OSError."""
    snapshots.complete(folder, rank, _half(folder, rank), sha256, told)


def discard(folder: Path, rank: int) -> None:
    _half(folder, rank).unlink(missing_ok=True)
    with suppress(OSError):  # other ranks still have files in the folder
        folder.rmdir()


def _half(folder: Path, rank: int) -> Path:
    return snapshots.content_of(folder, rank).with_suffix(".half")


def read(folder: Path, rank: int) -> dict[str, Any]:
    """Return the content of a rank's part of a snapshot. Raises NotResumed if the file is missing, incomplete, damaged,
    of another version, or has unexpected content."""
    told, path = snapshots.about(folder, rank), snapshots.content_of(folder, rank)
    try:
        found = snapshots.digest(path)
    except OSError as error:
        raise NotResumed(f"{path}: cannot be read: {error.strerror}") from error
    if found != told["sha256"]:
        raise NotResumed(f"{path}: is damaged (its checksum differs): resume from another snapshot")
    check_archive(path)
    try:
        content = load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises various errors for content other than plain values
        raise NotResumed(f"{path}: cannot be read: {str(error).partition(chr(10))[0]}") from error
    return check_content(path, content, told["step"], common=told["common"])


def islands(size: int) -> str:
    """Return how a job is divided, as text. size: number of ranks of each island; 1 without islands."""
    return f"islands of {size} ranks" if size > 1 else "no islands"


class StoredSnapshot:
    """A stored snapshot, as the point up to which a replay runs the script."""

    def __init__(self, runtime: Runtime, values: ReadValues) -> None:
        """Read the snapshot that `--resume` names. Raises NotResumed if this rank's part is missing, damaged or of
        another script."""
        folder, rank = Path(runtime.ranks.config.resume), runtime.ranks.world.rank
        there = snapshots.parts(folder)
        parts = {each: snapshots.about(folder, each) for each in there}
        source = snapshot_parts.source(parts, rank, runtime.ranks.world.world_size)
        self._root = folder.parent
        self._say = runtime.ranks.say
        self._common = read(folder, source.common)
        self._own = self._common
        if source.own is not None and source.own != source.common:
            self._own = read(folder, source.own)
        # The snapshot has no part of this rank, because the rank was lost before, so it gets a new random stream.
        elif source.own is None and "shared" in self._own["random"]:
            self._own = {**self._own, "random": {"shared": self._own["random"]["shared"]}}
            # Attributes of modules may have values that only make sense on the rank that wrote this part.
            if runtime.script.knows_rank:
                self._own.pop("counts", None)
        told = parts[source.common if source.own is None else source.own]
        self._ranks, self._parts = runtime.ranks, told["parts"]
        if runtime.ranks.world.island_size:
            self._check_parts()
        if not runtime.ranks.config.force:
            check(told)
        self.is_exact = source.is_exact
        """Whether exactly the ranks that took the snapshot resume from it. If so, each rank resumes with its own state;
        if not, only with the state that all ranks have in common."""
        values.recorded = bytearray(self._own["values"].numpy().tobytes())
        # If fewer ranks resume than took the snapshot, a step still has the same data, and each rank reads a larger
        # part.
        runtime.ranks.shares = told["shares"]
        self.digest = source.batch
        """Hash of the arguments of the first training forward after the snapshot; empty if unknown."""
        self.at_start: dict[str, Any] | None = self._own["at_start"]
        """State of the random generators with which the script began, if nothing has seeded them; otherwise None."""
        self.began: float = told["began"]
        """When the job's first training forward began, in seconds since the epoch."""
        self.step: int = self._own["step"]
        self.log = folder.parent / f"replayed-rank{rank}.log"
        """Path of a file for the script's output during the replay."""

    def _check_parts(self) -> None:
        """Raise NotResumed if ranks hold other parts of the model than those that took the snapshot. A mesh of the
        script's own that divides ranks is known once the script has sharded its model."""
        if self._parts != (mine := self._ranks.world.parts):
            raise NotResumed(f"the snapshot is one of {islands(self._parts)}, and this job has {islands(mine)}")

    def further(self) -> bool:
        """Called when the replay has reached its goal. Returns whether the goal has moved on to a later step, which a
        snapshot's never does."""
        return False

    def state(self, mine: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return this rank's own state at the goal, and the state that all ranks have in common. mine: the tensors of
        the script's modules, some of which may be used as they are. Raises NotResumed."""
        self._check_parts()
        found, size = base.complete(self._root, self._common.get("base", {}), mine)
        if size:
            self._say(
                f"the script has built other frozen weights than before: {readable(size)} come from {self._root}",
                "warning",
            )
        return self._own, {**self._common, "tensors": {**self._common["tensors"], **found}}
