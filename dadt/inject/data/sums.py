"""Warns if the script may divide a sum over its rank's batches by the size of the whole data set, as many tutorials
do."""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from dadt.inject.data.role import TRAINS, LoaderRole
from dadt.inject.data.samplers import Loader
from dadt.inject.failure import is_users
from dadt.train.runtime import Runtime

_READS = re.compile(r"\blen\(\s*[\w.\[\]'\"]+\.(dataset|sampler)\s*\)")


def install(runtime: Runtime, role_of: Callable[[Loader], LoaderRole | None]) -> None:
    """Tell the user once, with file and line, that the script's own code reads `len(loader.dataset)` or
    `len(loader.sampler)` of a loader that trains, after a pass in which each rank had its share. What the script
    computes with the number is not known.
    """
    pid, told = os.getpid(), False

    def look(loader: Loader, name: str, frame: FrameType) -> None:
        nonlocal told
        role = role_of(loader)
        if told or role is None or not role.has_trained or role.kind != TRAINS or role.gives_all:
            return
        file, line = frame.f_code.co_filename, linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        found = _READS.search(line)
        if found is None or found[1] != name or runtime.replay.under_way or os.getpid() != pid or not is_users(file):
            return
        told = True
        runtime.ranks.say(
            _sentence(role, name, len(loader.__dict__[name]), runtime.ranks.world.world_size, file, frame.f_lineno)
        )

    for name in ("dataset", "sampler"):
        setattr(DataLoader, name, _watched(name, look))


def _sentence(role: LoaderRole, name: str, samples: int, ranks: int, file: str, line: int) -> str:
    return (
        f"{role.name}: len(loader.{name}) ({Path(file).name}, line {line}) is {samples:,}, the samples of all {ranks}"
        f" ranks, and a sum over this rank's batches is over 1/{ranks} of them: to get a mean, divide it by the samples"
        f" that the loop has seen, about {samples // ranks:,}"
    )


def _watched(name: str, look: Callable[[Loader, str, FrameType], None]) -> property:
    """Return a property that calls `look` when it is read. Its value stays in the loader's `__dict__`, where copies,
    pickles and views find it."""

    def get(loader: Loader) -> Any:
        if name not in loader.__dict__:
            raise AttributeError(f"{type(loader).__name__!r} object has no attribute {name!r}")
        look(loader, name, sys._getframe(1))
        return loader.__dict__[name]

    def put(loader: Loader, value: Any) -> None:
        loader.__dict__[name] = value

    def remove(loader: Loader) -> None:
        loader.__dict__.pop(name, None)

    return property(get, put, remove)
