"""Coordinates `torch.save` and similar functions that save to a path, in a script that does not know of other ranks.

The first rank of each host writes to a temporary path and renames it to the target, so that nobody reads a partial
file. The other ranks of the host wait until this rank has saved the file. Saves to open file objects are not
coordinated.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dadt.control.worker_line import WorkerLine
from dadt.inject import full_disk
from dadt.inject.after_import import after_import
from dadt.inject.files.overlay import Overlay
from dadt.inject.files.whole import Write, mark_of, marks, write_whole
from dadt.inject.files.writers import Mode, WriteRole, Writers
from dadt.train.runtime import Runtime

PATIENCE_SECONDS = 2.0
"""Seconds that a rank waits for the host's first rank to begin the same `torch.save`."""


class Saver:
    """Replaces `torch.save` and similar functions in a worker."""

    def __init__(self, runtime: Runtime, overlay: Overlay | None = None) -> None:
        """overlay: this rank's view of the file system; None if no other rank of this host writes files."""
        self.runtime = runtime
        self._ranks = runtime.ranks
        self.overlay = overlay
        self.writers = overlay.writers if overlay is not None else Writers(runtime)
        self._counts: Counter[str] = Counter()
        self._missed: set[str] = set()
        self._folders: set[Path] = set()
        """Folders in which this rank has saved real files."""
        self._alone = not runtime.hooked
        self._world = runtime.ranks.world
        """The rank's place in the job. Stored here for forked children, in which the runtime no longer knows it."""
        self._number = 0
        """Number of saves that this rank has begun. Saves of the same number on different ranks belong together if
        their paths are alike."""
        self._thread = threading.local()
        self._pid = os.getpid()

    def saving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `original`, which saves its first argument to a path or open file, wrapped so that ranks save to the
        same path only once."""
        name = list(inspect.signature(original).parameters)[1]
        original = full_disk.noting(original, name)

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            # torch.jit.save calls its module's method `save`, which is wrapped, too; only the outer call is
            # coordinated.
            if getattr(self._thread, "saves", False):
                return original(*args, **kwargs)
            # A forked child, such as a DataLoader's worker process, has no predicted weights to replace by true ones.
            in_child = os.getpid() != self._pid
            if not in_child:
                self.runtime.show_true_weights()
            f = args[1] if len(args) > 1 else kwargs.get(name)
            if self._alone or not isinstance(f, (str, os.PathLike)):
                return original(*args, **kwargs)

            def write(path: str) -> Any:
                if len(args) > 1:
                    return original(args[0], path, *args[2:], **kwargs)
                return original(*args, **{**kwargs, name: path})

            self._thread.saves = True
            try:
                return (self._save_in_child if in_child else self._save)(os.fspath(f), write)
            finally:
                self._thread.saves = False

        return save

    def patch(self, name: str, owner: Any) -> None:
        setattr(owner, name, self.saving(getattr(owner, name)))

    def regrouped(self) -> None:
        """Called when ranks were lost. If this rank is the first of its host, it removes the incomplete files of lost
        ranks. It may also have to write real files from now on, in place of a rank of a lost host or island."""
        first = self._ranks.first
        writes = self.writers.take_over() if first else self.writers.mode is Mode.SCRIPT
        if writes and self.overlay is not None:
            self.overlay.take_over()
        if not first:
            return
        # Copied, because another thread may add a folder meanwhile if ranks train independently.
        for folder in list(self._folders):
            with suppress(OSError, ValueError):  # the folder may have been removed
                for half in folder.glob(f"{self._marks}*"):
                    _, _, rank, *_ = half.name.removeprefix(self._marks).split("-")
                    if int(rank) not in self._ranks.newest.members:
                        shutil.rmtree(half, ignore_errors=True)

    def take_over(self) -> None:
        """Let this rank write real files in place of the first rank of its host."""
        self.writers.take_over()
        if self.overlay is not None:
            self.overlay.take_over()

    def _save(self, f: str, write: Write) -> Any:
        overlay = self.overlay
        if self.runtime.replay.under_way:  # a replay repeats a save that the original run has made
            return overlay.stand_in(f) if overlay is not None else None
        self._number += 1
        target = _target(f)
        path = overlay.path(f) if overlay is not None else None
        if target is None:
            return write(f)
        # This save counts even if the folder does not exist yet, because the rank that creates it may only be late.
        count = self._count(target)
        copied = self._copied(path)
        # No other rank writes into a folder that exists only on this rank, such as one named by time.
        alone = copied is not None and overlay is not None and overlay.is_private(str(Path(copied).parent))
        if not (alone or self.writers.is_first(str(target))):
            if self._is_saved(target, count):
                return overlay.awaited(path) if overlay is not None and path is not None else None
            # This rank may have become the first one, in place of a lost rank.
            copied = self._copied(path)
        first = self.writers.is_first(str(target))
        if copied is not None and overlay is not None:
            return self._write_whole(Path(overlay.place(copied)), write)
        self._folders.add(target.parent)
        if self._ranks.control is not None:
            self._ranks.control.writes(str(target.parent), self._mark)
        if overlay is not None and path is not None:
            overlay.saved(path)
        result = self._write_whole(target, write)
        if first and count is not None and self._ranks.control is not None:
            self._ranks.control.saved(str(target), count, self._number)
            if self.writers.is_far(str(target)):
                self._ranks.control.wrote(str(target), count=count, number=self._number)
        return result

    def _save_in_child(self, f: str, write: Write) -> Any:
        """Save in a forked child, without coordination, because other ranks do not wait for a child."""
        copied = self._copied(self.overlay.path(f)) if self.overlay is not None else None
        if copied is not None and self.overlay is not None:
            return self._write_whole(Path(self.overlay.place(copied)), write)
        target = _target(f)
        return write(f) if target is None else self._write_whole(target, write)

    def _copied(self, path: str | None) -> str | None:
        """Return the path if this rank saves a private copy in place of the real file; else None. Since a save writes
        the file completely, files that become real when closed count as real."""
        if self.overlay is None or path is None or self.overlay.role(path, begins=True) is not WriteRole.APART:
            return None
        return path

    def _write_whole(self, path: Path, write: Write) -> Any:
        with self.overlay.real() if self.overlay is not None else nullcontext():
            return write_whole(path, self._mark, write)

    def _count(self, target: Path) -> int | None:
        """Count this save, and return how often this rank has saved to this path; None if the ranks' saves are not
        coordinated."""
        runtime = self.runtime
        if runtime.ranks.control is None or not self.writers.saves_once:
            return None
        self._counts[str(target)] += 1
        return self._counts[str(target)]

    def _is_saved(self, target: Path, count: int | None) -> bool:
        """Return whether the host's first rank saves the same file. If so, the file exists when this method returns."""
        if count is None or self._ranks.control is None:
            return False
        saved = self._appears(self._ranks.control, target, count)
        if not (saved or self.writers.is_first(str(target))):
            self._missed.add(str(target))
        return saved

    def _appears(self, control: WorkerLine, target: Path, count: int) -> bool:
        """Wait for the host's first rank to write the file. Return False if this rank should write the file itself.

        The first rank may never make the same save, and may itself wait for this rank in an exchange. So this rank
        waits only briefly, unless the first rank is already writing. If the first rank was only late, both ranks write
        the file.
        """
        number, step, far = self._number, self._ranks.step, self.writers.is_far(str(target))
        patient = self._ranks.together and str(target) not in self._missed
        begun = time.monotonic()
        end = begun + (self._ranks.config.timeout if patient else 0.0)
        writing = patient and self._is_writing(target)
        while True:
            patience = min(PATIENCE_SECONDS, max(end - time.monotonic(), 0.0))
            verdict = control.await_save(str(target), count, number, step, patience, far)
            if verdict == "yours":
                self.take_over()
            if verdict != "write" or time.monotonic() >= end:
                return verdict == "there"
            # A file that was being written when the last wait began may be complete although its save is not reported
            # yet.
            was_writing, writing = writing, self._is_writing(target)
            if not (writing or was_writing):
                return False
            self._ranks.tell_waiting(f"saving {target.name}", time.monotonic() - begun)

    def _is_writing(self, target: Path) -> bool:
        world = self._ranks.world
        writer = f"*-{self.writers.writer}" if self.writers.is_far(str(target)) else f"{world.cross_rank}-0"
        folders = target.parent.glob(f"{self._marks}{writer}-*")
        return any((folder / target.name).exists() for folder in folders)

    @property
    def _mark(self) -> str:
        """Prefix of the names of the temporary folders in which this rank writes."""
        return mark_of(self._world)

    @property
    def _marks(self) -> str:
        return marks(self._world)


def _target(f: str) -> Path | None:
    """Return the real path of the file `f`, with links followed; None if the save function should write to `f`
    directly."""
    target = Path(os.path.realpath(f))
    if not target.parent.is_dir() or (target.exists() and not target.is_file()):
        return None  # writing fails, or `f` is a device that must not be replaced
    return target


def _in_one_file(
    original: Callable[..., Any], saving: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Return Keras's save function wrapped by `saving`, so that a file is saved only once. With max_shard_size Keras
    may write several files; in this case each rank saves for itself."""
    once = saving(original)

    @functools.wraps(original)
    def save(model: Any, filepath: Any, max_shard_size: Any = None, *args: Any, **kwargs: Any) -> Any:
        return (once if max_shard_size is None else original)(model, filepath, max_shard_size, *args, **kwargs)

    return save


def install(runtime: Runtime, overlay: Overlay | None = None) -> Saver:
    saver = Saver(runtime, overlay)
    torch.save = torch.serialization.save = saver.saving(torch.save)
    saver.patch("save", torch.jit)
    saver.patch("save", getattr(torch.jit, "RecursiveScriptModule"))  # noqa: B009

    def keras_weights(module: Any) -> None:
        module.save_weights_only = _in_one_file(module.save_weights_only, saver.saving)

    after_import("keras.src.saving.saving_lib", keras_weights)
    after_import("keras.src.legacy.saving.legacy_h5_format", partial(saver.patch, "save_model_to_hdf5"))
    after_import("torch.export", partial(saver.patch, "save"))
    after_import("tokenizers", lambda module: saver.patch("save", getattr(module, "Tokenizer")))  # noqa: B009
    after_import("safetensors.torch", partial(saver.patch, "save_file"))
    return saver
