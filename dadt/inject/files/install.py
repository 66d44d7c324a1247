"""Installs the overlay's functions in `os`, `open` and libraries, so that ranks do not overwrite one another's
files."""

from __future__ import annotations

import atexit
import builtins
import functools
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from dadt.control import job_folder, written_files
from dadt.inject.after_import import after_import
from dadt.inject.files.journal import WrittenJournal
from dadt.inject.files.overlay import Overlay
from dadt.inject.files.until_closed import is_held, wrapped
from dadt.inject.files.whole import mark_of
from dadt.inject.files.writers import Writers
from dadt.inject.patch import replaces
from dadt.train.runtime import Runtime

CACHES = re.compile(r"_HOME|_CACHE|CACHE_?DIR|CONFIG_?DIR|_TMPDIR")
"""Matches the names of environment variables that contain folders which libraries share among processes, with locks of
their own."""
SHARED = re.compile(r"/(wandb|[^/]*cache[^/]*)(/|$)|\.lock$", re.IGNORECASE)
"""Matches paths of folders and lock files that are shared with processes outside the job."""
READERS = ("access", "readlink", "statvfs", "listxattr", "getxattr")
CHANGERS = ("chmod", "chown", "lchown", "utime", "setxattr", "removexattr")
OPEN = (("bz2", "_builtin_open"), ("tarfile", "bltn_open"), ("tokenize", "_builtin_open"))
"""Modules that store their own reference to `open`, each with the name of the attribute."""


class Scope:
    """Decides for which paths ranks write private copies in place of the real file."""

    def __init__(self, *ours: str) -> None:
        """ours: prefixes of the paths to which DADT itself writes."""
        self._ours = tuple(os.path.abspath(path) for path in ours if path)
        named = [Path(word.rpartition("=")[2]) for word in sys.argv[1:]]
        inside = [os.getcwd(), *(str(path) for path in named if path.is_absolute() and len(path.parts) > 2)]
        self._inside = tuple(path + os.sep for path in inside if path != tempfile.gettempdir())
        home = os.path.expanduser("~/.")
        caches = [value for name, value in os.environ.items() if CACHES.search(name) and os.path.isabs(value)]
        folders = (tempfile.gettempdir(), "/dev", "/proc", "/sys", "/run", "/var", *caches)
        self._outside = (home, *(os.path.abspath(path) + os.sep for path in folders))

    def keeps(self, path: str) -> bool:
        """Whether ranks get private copies of a path. Paths in temporary folders and caches get none, unless the script
        works in the folder or one of its arguments names the folder."""
        inside = max((each for each in self._inside if path.startswith(each)), key=len, default="")
        if path.startswith(self._ours) or (path.startswith(self._outside) and not inside):
            return False
        return SHARED.search(path, max(len(inside) - 1, 0)) is None


def install(runtime: Runtime) -> Overlay | None:
    """Install the overlay of this rank's files. Returns None if no other rank writes in the folders of this host."""
    world, config = runtime.ranks.world, runtime.ranks.config
    joined_by_others = config.min_np > 0  # a host that joins later may share the folder
    if world.local_size == 1 and world.folder_writer < 0 and not (joined_by_others or runtime.replay.under_way):
        return None
    # One second before this process started, because another rank of this host may have started a little earlier.
    start = psutil.Process().create_time() - 1.0
    folder = job_folder.of_worker(world)
    writers, pid = Writers(runtime), os.getpid()

    def relay(path: str, size: int) -> bool:
        speaks = runtime.ranks.control is not None and writers.is_far(path) and os.getpid() == pid
        return speaks and runtime.ranks.control is not None and runtime.ranks.control.wrote(path, size=size)

    def hear() -> Sequence[bytes]:
        return runtime.ranks.control.heard() if runtime.ranks.control is not None and os.getpid() == pid else ()

    def tell(what: str, waited: float) -> None:
        if os.getpid() == pid:
            runtime.ranks.tell_waiting(what, waited)

    heard = hear if world.launcher else None
    overlay = Overlay(
        folder / f"files-{world.local_rank}",
        Scope(config.timeline, config.snapshot_dir).keeps,
        writers,
        WrittenJournal(folder / written_files.NAME, world.rank, config.timeout, relay, heard, tell),
        start,
        mark_of(world),
        lambda: runtime.ranks.step,
        folder / f"files-of-island-{world.island}" if world.island_size else None,
    )
    _patch_writing(overlay)
    if overlay.writers.reads_apart:
        _patch_reading(overlay)
        _patch_libraries(overlay)
        runtime.events.on_stepped.append(overlay.held.stepped)
        atexit.register(overlay.held.hand_over)
    return overlay


def _patch_writing(overlay: Overlay) -> None:
    unlink = os.unlink
    put: dict[str, Callable[..., Any]] = {"unlink": overlay.remove, "replace": overlay.rename}
    names = ("open", "truncate", "mkdir", "remove", "rmdir", "rename", "symlink", "link", "listdir", "scandir")
    put |= {name: getattr(overlay, name) for name in names}
    for name, function in put.items():
        _replace(os, name, function)
    _replace(shutil, "rmtree", overlay.rmtree(shutil.rmtree))
    _patch_open(overlay)
    closer: Any = getattr(tempfile, "_TemporaryFileCloser")  # noqa: B009
    for name in ("close", "cleanup"):  # both methods have the original `unlink` as default argument
        if (end := vars(closer).get(name)) is not None and end.__defaults__:
            end.__defaults__ = tuple(os.unlink if each is unlink else each for each in end.__defaults__)


def _patch_open(overlay: Overlay) -> None:
    original = io.open
    apart = overlay.writers.reads_apart

    @functools.wraps(original)
    def open(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Callable[[str, int], int] | None = None,
    ) -> Any:
        if opener is None and (apart or mode not in ("r", "rb")) and overlay.path(file) is not None:
            return opened(overlay, file, mode, buffering, encoding, errors, newline, closefd, original=original)
        return original(file, mode, buffering, encoding, errors, newline, closefd, opener)

    builtins.open = io.open = open
    _replace_in_pathlib("open", original, open)
    for name, attribute in OPEN:
        if name in sys.modules:
            setattr(sys.modules[name], attribute, open)


def opened(
    overlay: Overlay,
    file: Any,
    mode: str,
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    *,
    original: Callable[..., Any] = io.open,
) -> Any:
    """Open a file as `open` does, at a path of which ranks get private copies."""
    if is_held(mode, closefd) and (raw := overlay.open_held(file, mode)) is not None:
        return wrapped(raw, mode, buffering, encoding, errors, newline)

    def opener(name: Any, flags: int) -> Any:
        return overlay.open(name, flags, 0o666)

    return original(file, mode, buffering, encoding, errors, newline, closefd, opener)


def _patch_reading(overlay: Overlay) -> None:
    """Patch the functions that read paths, so that they read this rank's private copies."""
    put = {name: overlay.reading(getattr(os, name)) for name in READERS}
    put |= {name: overlay.changing(getattr(os, name)) for name in CHANGERS}
    put |= {name: overlay.looking(getattr(os, name)) for name in ("stat", "lstat")}
    put |= {"chdir": overlay.chdir}
    for name, function in put.items():
        _replace(os, name, function)

    @replaces("__init__", subprocess.Popen)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        overlay.held.hand_over()  # the new process may receive paths of files that this process has open
        if kwargs.get("cwd") is not None and (known := overlay.path(kwargs["cwd"])) is not None:
            kwargs["cwd"] = overlay.where(known)
        init.__wrapped__(self, *args, **kwargs)


def _replace(module: Any, name: str, function: Callable[..., Any]) -> None:
    original = getattr(module, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    setattr(module, name, call)
    for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        if original in supported:
            supported.add(call)
    _replace_in_pathlib(name, original, call)


def _replace_in_pathlib(name: str, original: Callable[..., Any], call: Callable[..., Any]) -> None:
    # Python 3.10's pathlib stores its own references to the functions of `os` in this object.
    accessor = getattr(sys.modules.get("pathlib"), "_NormalAccessor", None)
    if getattr(accessor, name, None) is original:  # the accessor's `open` is that of io, not that of os
        setattr(accessor, name, staticmethod(call))


def _patch_libraries(overlay: Overlay) -> None:
    """Patch library functions that read or write a path without Python's `open`."""
    _load_apart(overlay, torch, torch.serialization)
    _load_apart(overlay, torch.jit)

    def safetensors(module: Any) -> None:
        module.safe_open = overlay.loading(module.safe_open)

    def tokenizers(module: Any) -> None:
        module.Tokenizer.from_file = staticmethod(overlay.reading(module.Tokenizer.from_file))

    def hdf5(module: Any) -> None:
        @replaces("__init__", module.File)
        def init(self: Any, name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
            init.__wrapped__(self, overlay.path_for_library(name, mode), mode, *args, **kwargs)

        module.is_hdf5 = overlay.reading(module.is_hdf5)

    after_import("h5py", hdf5)
    after_import("safetensors", safetensors)
    after_import("tokenizers", tokenizers)


def _load_apart(overlay: Overlay, *modules: Any) -> None:
    reading = overlay.loading(modules[0].load)

    @replaces("load", *modules)
    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        return reading(f, *args, **kwargs)
