"""`torch.save` to a path, in a script that believes it is alone.

The first local rank of each host writes, beside the target and then renamed over it, so that nobody ever
reads half a file; the other ranks of the host wait until it is there. Open file objects are each rank's own.
`torch.jit.save` and `torch.export.save` are not covered: under those, every rank writes the file itself.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from dadt.inject.rank import Rank

PATIENCE_SECONDS = 2.0
"""How long a rank waits for the first local rank to come to the same `torch.save`."""


class Control(Protocol):
    """The control channel, as saving needs it."""

    def saved(self, path: str, count: int) -> None: ...
    def await_save(self, path: str, count: int, step: int, timeout: float) -> str: ...


class SavingRank(Rank, Protocol):
    """A rank as saving needs it."""

    @property
    def control(self) -> Control | None: ...
    @property
    def step(self) -> int: ...
    @property
    def script_is_distributed(self) -> bool: ...
    @property
    def together(self) -> bool: ...
    def show_true_weights(self) -> None: ...


Save = Callable[..., None]


class Saver:
    """Stands in for `torch.save` in a worker."""

    def __init__(self, runtime: SavingRank, original: Save) -> None:
        self.runtime = runtime
        self.original = original
        self._counts: Counter[str] = Counter()
        self._pid = os.getpid()

    def save(self, obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if os.getpid() != self._pid:  # a DataLoader's worker process, which holds no weights of ours
            return self.original(obj, f, *args, **kwargs)
        self.runtime.show_true_weights()
        target = self._target(f)
        if target is None:
            return self.original(obj, f, *args, **kwargs)

        def write() -> None:
            write_beside(target, self._mark(), lambda path: self.original(obj, path, *args, **kwargs))

        control, config = self.runtime.control, self.runtime.config
        if control is None or not config.save_once or self.runtime.script_is_distributed:
            return write()
        self._counts[str(target)] += 1
        count = self._counts[str(target)]
        if self.runtime.world.local_rank == 0:
            write()
            control.saved(str(target), count)
        elif not self._appears(control, target, count):
            write()
        return None

    def _appears(self, control: Control, target: Path, count: int) -> bool:
        """Wait for the first local rank to write the file; False where this rank had better write it itself.

        The first local rank may never save here, and may wait for this rank in an exchange meanwhile: unless it
        is writing by now, it is not waited for long. Should it only be late, the file is written twice.
        """
        if not self.runtime.together:
            return control.await_save(str(target), count, self.runtime.step, timeout=0.0) == "there"
        end = time.monotonic() + self.runtime.config.timeout
        while True:
            patience = min(PATIENCE_SECONDS, max(end - time.monotonic(), 0.0))
            if control.await_save(str(target), count, self.runtime.step, timeout=patience) == "there":
                return True
            if time.monotonic() >= end or not self._is_writing(target):
                return False

    def _is_writing(self, target: Path) -> bool:
        folders = target.parent.glob(f"{self._mark(0)}*")
        return any((folder / target.name).exists() for folder in folders)

    def _mark(self, local_rank: int | None = None) -> str:
        """How the names of the folders begin in which a rank writes."""
        world = self.runtime.world
        return f".dadt-{world.job}-{world.cross_rank}-{world.local_rank if local_rank is None else local_rank}-"

    def _target(self, f: Any) -> Path | None:
        """The file that `f` means, links followed; None where torch had better write to `f` itself."""
        if self.runtime.world.world_size == 1 or not isinstance(f, (str, os.PathLike)):
            return None
        target = Path(os.path.realpath(f))
        if not target.parent.is_dir() or (target.exists() and not target.is_file()):
            return None  # torch's own error, or a device such as /dev/null that must not be replaced
        return target


def write_beside(target: Path, mark: str, write: Callable[[str], None]) -> None:
    """Call `write` with a path beside `target`, then rename what it wrote over `target`, or leave nothing.

    It lies in a folder of its own, whose name begins with `mark`.

    The path ends in the target's own name, which torch stores in the archive: the bytes do not depend on
    where they were written. Permissions are the target's, or the umask's where it is new.
    """
    try:
        folder = tempfile.mkdtemp(prefix=mark, dir=target.parent)
    except PermissionError:  # the folder is closed but the file may be writable
        write(str(target))
        return
    beside = Path(folder) / target.name
    try:
        write(str(beside))
        if target.exists():
            shutil.copymode(target, beside)
        beside.replace(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def install(runtime: SavingRank) -> None:
    saver = Saver(runtime, torch.save)

    @functools.wraps(torch.save)
    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        saver.save(obj, f, *args, **kwargs)

    torch.save = torch.serialization.save = save
