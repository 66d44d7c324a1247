"""`torch.save` and its like to a path, in a script that believes it is alone.

The first local rank of each host writes, beside the target and then renamed over it, so that nobody ever
reads half a file; the other ranks of the host wait until it is there. Open file objects are each rank's own.
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
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dadt.control.worker_line import WorkerLine
from dadt.inject import full_disk
from dadt.inject.after_import import after_import
from dadt.inject.files.overlay import Overlay
from dadt.inject.files.whole import Write, mark_of, marks, write_whole
from dadt.inject.files.writers import WriteRole, Writers
from dadt.train.runtime import Runtime

PATIENCE_SECONDS = 2.0
"""How long a rank waits for the first local rank to come to the same `torch.save`."""


class Saver:
    """Stands in for `torch.save` and its like in a worker."""

    def __init__(self, runtime: Runtime, overlay: Overlay | None = None) -> None:
        """overlay: None if no other rank of this host writes files."""
        self.runtime = runtime
        self._ranks = runtime.ranks
        self.overlay = overlay
        self.writers = overlay.writers if overlay is not None else Writers(runtime)
        self._counts: Counter[str] = Counter()
        self._missed: set[str] = set()
        self._folders: set[Path] = set()
        """Folders in which this rank has written files for good."""
        self._alone = not runtime.hooked
        self._world = runtime.ranks.world
        """The rank's place, kept for a forked child, in which the runtime is no rank any more."""
        self._number = 0
        """How many saves this rank has begun: each is the others' of the same number, if the paths are alike."""
        self._thread = threading.local()
        self._pid = os.getpid()

    def saving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`original`, which saves its first argument to its second, a path or an open file."""
        name = list(inspect.signature(original).parameters)[1]
        original = full_disk.noting(original, name)

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._thread, "saves", False):  # torch.jit.save calls its module's save
                return original(*args, **kwargs)
            in_child = os.getpid() != self._pid  # a DataLoader's worker, which holds no weights of ours
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

    def regrouped(self) -> None:
        """Ranks were lost. Where this one writes for good, it removes what those of a host without its agent have left
        half written."""
        if not self._ranks.first:
            return
        if self.writers.take_over() and self.overlay is not None:
            self.overlay.take_over()
        for folder in list(self._folders):  # where ranks train apart, another thread saves meanwhile
            with suppress(OSError, ValueError):  # it may be gone
                for half in folder.glob(f"{self._marks}*"):
                    _, _, rank, *_ = half.name.removeprefix(self._marks).split("-")
                    if int(rank) not in self._ranks.members:
                        shutil.rmtree(half, ignore_errors=True)

    def take_over(self) -> None:
        """Let this rank write for good from now on, in place of the first of its host."""
        self.writers.take_over()
        if self.overlay is not None:
            self.overlay.take_over()

    def _save(self, f: str, write: Write) -> Any:
        overlay = self.overlay
        if self.runtime.replay.under_way:  # it has been saved before
            return overlay.stand_in(f) if overlay is not None else None
        self._number += 1
        target = _target(f)
        path = overlay.path(f) if overlay is not None else None
        copied = path if overlay is not None and path is not None and self._is_copied(overlay, path) else None
        if target is None:
            return write(f)
        # Counted wherever it is written: the first rank may only be late to make the folder.
        count = self._count(target)
        # In a folder that this rank alone has, such as one named by time, no other rank writes.
        alone = copied is not None and overlay is not None and overlay.is_private(str(Path(copied).parent))
        first = self.writers.is_first(str(target))
        if not (alone or first) and self._is_saved(target, count):
            return overlay.awaited(path) if overlay is not None and path is not None else None
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
        """Save in a forked child, without waiting for other ranks, which do not wait for it either."""
        path = self.overlay.path(f) if self.overlay is not None else None
        if self.overlay is not None and path is not None and self._is_copied(self.overlay, path):
            return self._write_whole(Path(self.overlay.place(path)), write)
        target = _target(f)
        return write(f) if target is None else self._write_whole(target, write)

    def _is_copied(self, overlay: Overlay, path: str) -> bool:
        """Whether this rank saves a copy: a file that is whole needs no closing to become the file itself."""
        return overlay.role(path, begins=True) is WriteRole.APART

    def _write_whole(self, path: Path, write: Write) -> Any:
        with self.overlay.real() if self.overlay is not None else nullcontext():
            return write_whole(path, self._mark, write)

    def _count(self, target: Path) -> int | None:
        """How often this rank has saved to this path; None where ranks save as they like."""
        runtime = self.runtime
        if runtime.ranks.control is None or not self.writers.saves_once:
            return None
        self._counts[str(target)] += 1
        return self._counts[str(target)]

    def _is_saved(self, target: Path, count: int | None) -> bool:
        """Whether the first local rank saves the file, too; then it is there."""
        if count is None or self._ranks.control is None:
            return False
        saved = self._appears(self._ranks.control, target, count)
        if not (saved or self.writers.is_first(str(target))):
            self._missed.add(str(target))
        return saved

    def _appears(self, control: WorkerLine, target: Path, count: int) -> bool:
        """Wait for the first local rank to write the file; False where this rank had better write it itself.

        The first local rank may never save here, and may wait for this rank in an exchange meanwhile: unless it
        is writing by now, it is not waited for long. Should it only be late, the file is written twice.
        """
        number, step, far = self._number, self._ranks.step, self.writers.is_far(str(target))
        patient = self._ranks.together and str(target) not in self._missed
        begun = time.monotonic()
        end = begun + (self._ranks.config.timeout if patient else 0.0)
        while True:
            patience = min(PATIENCE_SECONDS, max(end - time.monotonic(), 0.0))
            verdict = control.await_save(str(target), count, number, step, patience, far)
            if verdict == "yours":
                self.take_over()
            if verdict != "write" or time.monotonic() >= end or not self._is_writing(target):
                return verdict == "there"
            self._ranks.tell_waiting(f"saving {target.name}", time.monotonic() - begun)

    def _is_writing(self, target: Path) -> bool:
        world = self._ranks.world
        writer = f"*-{self.writers.writer}" if self.writers.is_far(str(target)) else f"{world.cross_rank}-0"
        folders = target.parent.glob(f"{self._marks}{writer}-*")
        return any((folder / target.name).exists() for folder in folders)

    @property
    def _mark(self) -> str:
        """How the names of the folders begin in which this rank writes."""
        return mark_of(self._world)

    @property
    def _marks(self) -> str:
        return marks(self._world)


def _target(f: str) -> Path | None:
    """The file that `f` means, links followed; None where torch had better write to `f` itself."""
    target = Path(os.path.realpath(f))
    if not target.parent.is_dir() or (target.exists() and not target.is_file()):
        return None  # torch's own error, or a device such as /dev/null that must not be replaced
    return target


def _in_one_file(
    original: Callable[..., Any], saving: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Keras's, which may write several files: then each rank writes them."""
    once = saving(original)

    @functools.wraps(original)
    def save(model: Any, filepath: Any, max_shard_size: Any = None, *args: Any, **kwargs: Any) -> Any:
        return (once if max_shard_size is None else original)(model, filepath, max_shard_size, *args, **kwargs)

    return save


def install(runtime: Runtime, overlay: Overlay | None = None) -> Saver:
    saver = Saver(runtime, overlay)
    saving = saver.saving
    torch.save = torch.serialization.save = saving(torch.save)
    torch.jit.save = saving(torch.jit.save)
    scripted: Any = getattr(torch.jit, "RecursiveScriptModule")  # noqa: B009
    scripted.save = saving(scripted.save)

    def export(module: Any) -> None:
        module.save = saving(module.save)

    def safetensors(module: ModuleType) -> None:
        setattr(module, "save_file", saving(module.save_file))  # noqa: B010

    def tokenizers(module: Any) -> None:
        module.Tokenizer.save = saving(module.Tokenizer.save)

    def keras_weights(module: Any) -> None:
        module.save_weights_only = _in_one_file(module.save_weights_only, saving)

    def keras_model(module: Any) -> None:
        module.save_model_to_hdf5 = saving(module.save_model_to_hdf5)

    after_import("keras.src.saving.saving_lib", keras_weights)
    after_import("keras.src.legacy.saving.legacy_h5_format", keras_model)
    after_import("torch.export", export)
    after_import("tokenizers", tokenizers)
    after_import("safetensors.torch", safetensors)
    return saver
