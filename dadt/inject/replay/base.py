"""Stores the tensors of a model that training does not change (frozen weights, large constant buffers) only once, in
one file per tensor next to the job's snapshots, so that no snapshot contains copies.

A script that runs again creates these tensors again, from a file or its seed, and mostly with the same values, which
digests in the snapshot verify. If values differ, because a file is gone or random numbers were not seeded, the stored
tensors are read instead, so that no work is lost.

<the job's folder>/snapshots/base/0123456789abcdef.pt     a tensor with this digest
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any

import torch
from torch import load, save  # imported by name, before DADT replaces `torch.save`

from dadt.comm.shards import local
from dadt.control import private_files, snapshots
from dadt.errors import DadtError, NotResumed
from dadt.inject.replay.content import check_archive
from dadt.train.digest import as_bytes, digests

FOLDER = "base"
LEAST = 1 << 20
"""Size in bytes from which a tensor is stored in a file of its own next to the snapshots."""
_UNUSED_SECONDS = 3600.0
"""Seconds after its last use at which a tensor's file is removed if no complete snapshot refers to it. Until then,
another rank may still be writing a snapshot that refers to it."""


def untrained(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of at least LEAST bytes that require no gradients."""
    return {
        name: t
        for name, t in tensors.items()
        if not t.requires_grad
        and t.layout == torch.strided
        and t.device.type != "meta"
        and not t.is_quantized
        and t.numel() * t.element_size() >= LEAST
    }


class Base:
    """Decides which tensors this rank's snapshot refers to by their digests instead of containing them."""

    def __init__(self, known: Mapping[torch.Tensor, int]) -> None:
        """known: the digests that tensors had when they were last compared and equal on all ranks."""
        self._known = known
        self._before: set[int] | None = None

    def common(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Return the digests of the tensors to refer to, by name: those that have not changed since the last snapshot.
        In the first snapshot, return those that are not known to have changed since they were equal on all ranks."""
        found = untrained(tensors)
        mine = dict(zip(found, digests(found.values()), strict=True))
        changed = {name for name, t in found.items() if t in self._known and self._known[t] != mine[name]}
        before, self._before = self._before, set(mine.values())
        return {name: d for name, d in mine.items() if (name not in changed if before is None else d in before)}

    def steady(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Return the digests of the tensors that have not changed since they were equal on all ranks, or since the last
        snapshot."""
        found = untrained(tensors)
        before = self._before or set()
        every = zip(found.items(), digests(found.values()), strict=True)
        return {name: d for (name, t), d in every if (t in self._known and self._known[t] == d) or d in before}

    def shared(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """Return the names of the tensors that have not changed since they were equal on all ranks, so that this rank's
        own part of a snapshot need not contain them."""
        found = {name: t for name, t in untrained(tensors).items() if t in self._known}
        return {
            name for (name, t), d in zip(found.items(), digests(found.values()), strict=True) if self._known[t] == d
        }


def keep(root: Path, rank: int, tensors: Mapping[int, torch.Tensor]) -> None:
    """Write the tensors that are not stored yet, in files named by their digests. Raises OSError, and DadtError if a
    tensor has changed since its digest was computed."""
    for digest, tensor in tensors.items():
        path = path_of(root, digest)
        if path.exists():
            os.utime(path)
            continue
        make_folders(path.parent)
        half = path.with_suffix(f".{rank}.half")
        try:
            host = local(tensor).detach().as_subclass(torch.Tensor).to("cpu")
            with private_files.open_file(half, inner=True) as file:
                written = snapshots.Content(file)
                save({"values": as_bytes(host).clone(), "like": host.new_empty(0), "shape": list(host.shape)}, written)  # type: ignore[arg-type]
                written.sync()
            if digests([host]) != [digest]:
                raise DadtError("the script has changed frozen weights while they were written")
            half.rename(path)
        finally:
            half.unlink(missing_ok=True)


def drop_unused(root: Path, now: float | None = None) -> None:
    """Remove the files of tensors to which no snapshot refers, if they were last used an hour ago or earlier. now:
    seconds since the epoch."""
    parts = [part for folder in root.glob("[0-9]*") for part in snapshots.described(folder).values()]
    needed = {path_of(root, digest) for part in parts for digest in part.get("base", ()) if isinstance(digest, int)}
    for path in (root / FOLDER).glob("*"):
        with suppress(OSError):
            if path not in needed and (now or time()) - path.stat().st_mtime > _UNUSED_SECONDS:
                path.unlink()


def complete(root: Path, kept: Mapping[str, int], mine: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], int]:
    """Return the tensors to which a snapshot refers by digest, and how many bytes of them had to be read from files,
    because the script's own tensors have other digests. kept: digests by name. mine: the script's tensors. Raises
    NotResumed if a tensor has neither the digest nor a file."""
    there = {name: mine[name] for name in kept if name in mine}
    same = {name for (name, t), d in zip(there.items(), _digests_of(there.values()), strict=True) if d == kept[name]}
    found = {
        name: mine[name] if name in same else _read(path_of(root, digest), digest) for name, digest in kept.items()
    }
    return found, sum(t.numel() * t.element_size() for name, t in found.items() if name not in same)


def path_of(root: Path, digest: int) -> Path:
    return root / FOLDER / f"{digest:016x}.pt"


def make_folders(folder: Path) -> None:
    """Create the folder and its missing parents, for this user only."""
    for each in [*reversed(folder.parents), folder]:
        if not each.is_dir():
            with suppress(FileExistsError):  # another rank may create the folder at the same time
                os.mkdir(each, private_files.PRIVATE)  # noqa: PTH102 (pathlib's is kept apart)


def _digests_of(tensors: Iterable[torch.Tensor]) -> list[int | None]:
    return [None if t.layout != torch.strided or t.device.type == "meta" else digests([t])[0] for t in tensors]


def _read(path: Path, digest: int) -> torch.Tensor:
    """Return the tensor stored in the file. Raises NotResumed if the file is missing, damaged, or contains another
    tensor."""
    if not path.is_file():
        raise NotResumed(
            f"{path}: is missing, and the script has built other frozen weights than those of the snapshot: let it find"
            " the files that it had, or bring this one back"
        )
    check_archive(path)
    try:
        held = load(path, map_location="cpu", weights_only=True)
        values, like, shape = held["values"], held["like"], held["shape"]
        found: torch.Tensor = values.view(like.dtype).view(shape)
    except Exception as error:  # torch raises various errors for content other than plain values
        raise NotResumed(f"{path}: cannot be read: {str(error).partition(chr(10))[0]}") from error
    if digests([found]) != [digest]:
        raise NotResumed(f"{path}: is damaged (its digest differs): resume from another snapshot")
    return found
