"""Makes sure that, on each host, only one rank at a time downloads into a folder.

The lock covers torch.hub.download_url_to_file and load_state_dict_from_url, and, if the script imports torchvision, its
functions download_url and download_and_extract_archive and the constructors of its data sets. Ranks that get the lock
later find the file already downloaded.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import inspect
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.hub

from dadt.control import job_folder
from dadt.errors import CommTimeout
from dadt.inject.after_import import after_import
from dadt.inject.files.overlay import Overlay
from dadt.train.runtime import Runtime
from dadt.world import World

POLL_SECONDS = 0.05


class Turn:
    """Lock that lets one rank of this host at a time download into a folder. Re-entrant within a thread.

    The lock files are in the job's own temporary folder, not next to the downloads, and are removed with that folder.
    """

    def __init__(self, world: World, timeout: float, overlay: Overlay | None = None) -> None:
        """timeout: seconds to wait for the lock. overlay: private copies of files, which are not used while the lock is
        owned, so that all ranks find what one has downloaded."""
        self.world = world
        self.overlay = overlay
        self.timeout = timeout
        self._held = threading.local()
        self._calls: Counter[str] = Counter()

    @contextmanager
    def of(self, folder: str | os.PathLike[str]) -> Iterator[None]:
        """A context in which this rank owns the lock for a folder. Raises CommTimeout after `timeout` seconds, naming
        the process that owns the lock."""
        with self.overlay.real() if self.overlay is not None else nullcontext(), self._turn(folder):
            yield

    @contextmanager
    def _turn(self, folder: str | os.PathLike[str]) -> Iterator[None]:
        key = os.path.realpath(folder)
        held: set[str] = self._held.__dict__.setdefault("folders", set())
        if key in held:
            yield
            return
        self._place().mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._file(key, "lock").open("a+") as lock:
            self._acquire(lock, key)
            held.add(key)
            try:
                yield
            finally:
                held.discard(key)
                lock.truncate(0)  # removes the owner's name; closing the file releases the lock

    def done(self, key: str, first: bool) -> bool:
        """Return whether another rank has already made this rank's next call for `key` (the n-th calls of all ranks
        count as the same call) or, with `first`, any call for it. Call this while the lock is owned."""
        self._calls[key] += 1
        record = self._file(key, "done")
        return record.exists() and int(record.read_text()) >= (1 if first else self._calls[key])

    def made(self, key: str) -> None:
        """Record that this rank's call for the key has succeeded."""
        self._file(key, "done").write_text(str(self._calls[key]))

    def _file(self, key: str, kind: str) -> Path:
        name = hashlib.blake2b(f"{self.world.job}:{key}".encode(), digest_size=10).hexdigest()
        return self._place() / f"{name}.{kind}"

    def _place(self) -> Path:
        return job_folder.of_worker(self.world) / "downloads"

    def _acquire(self, lock: Any, folder: str) -> None:
        end = time.monotonic() + self.timeout
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    lock.seek(0)
                    raise CommTimeout(
                        f"rank {self.world.rank} waited {self.timeout:g} s to download into {folder}, which"
                        f" {lock.read() or 'another process'} is doing"
                    ) from None
                time.sleep(POLL_SECONDS)
        lock.truncate(0)
        lock.write(f"rank {self.world.rank} (pid {os.getpid()})")
        lock.flush()


def in_turn(turn: Turn, original: Callable[..., Any], folder: str, made: str = "") -> Callable[..., Any]:
    """Return `original`, a function that downloads, wrapped so that the ranks of a host call it one after another.
    folder: name of its parameter for the destination.

    made: "file" if the destination is a file, which only the first rank to call creates; "folder" if other ranks may
    already read the files that the call creates in a folder, so that a job makes the call only once; "" if the function
    itself checks for existing files."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        target = Path(given.arguments[folder] or Path(torch.hub.get_dir()) / "checkpoints").expanduser()
        if not given.arguments.get("download", True):
            return original(*args, **kwargs)
        with turn.of(target.parent if made == "file" else target):
            if not made:
                return original(*args, **kwargs)
            key = f"{original.__qualname__}{sorted((k, repr(v)) for k, v in given.arguments.items())}"
            if turn.done(key, first=made == "folder") and target.exists():
                return None
            result = original(*args, **kwargs)
            turn.made(key)
            return result

    return call


def install(runtime: Runtime, overlay: Overlay | None = None) -> None:
    config = runtime.ranks.config
    if not config.lock_downloads or runtime.ranks.world.world_size == 1:
        return
    turn = Turn(runtime.ranks.world, config.timeout, overlay)
    hub = torch.hub
    hub.download_url_to_file = in_turn(turn, hub.download_url_to_file, "dst", "file")
    hub.load_state_dict_from_url = in_turn(turn, hub.load_state_dict_from_url, "model_dir")

    def utils(module: ModuleType) -> None:
        names = {"download_url": ("root", ""), "download_and_extract_archive": ("download_root", "folder")}
        for name, (folder, made) in names.items():
            if hasattr(module, name):
                setattr(module, name, in_turn(turn, getattr(module, name), folder, made))

    def vision(module: ModuleType) -> None:
        """Make ranks run the constructors of torchvision's data sets one after another, since these constructors find,
        download and open the files."""

        def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:
            super(module.VisionDataset, cls).__init_subclass__(**kwargs)
            if {"root", "download"} <= set(inspect.signature(cls.__init__).parameters):
                cls.__init__ = in_turn(turn, cls.__init__, "root")

        module.VisionDataset.__init_subclass__ = classmethod(__init_subclass__)

    after_import("torchvision.datasets.utils", utils)
    after_import("torchvision.datasets.vision", vision)
