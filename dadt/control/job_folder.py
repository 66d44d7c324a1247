"""The folder of a running job on one host, named by the job's id: the agent's socket, steps and stacks."""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from dadt.control.guard import Guard
from dadt.errors import LaunchError
from dadt.world import World

LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"
"""Characters of a job's id, without those that are easily confused."""
FRESH_SECONDS = 60.0
SOCKET = "agent"
ASK = ".ask"
"""The end of the name of the pipe through which a worker is asked for its stacks."""


class Folder:
    """/tmp/dadt-<uid>/<job>, readable by this user only. Its holders share its lock, so a folder whose lock is free
    is stale, and the next job removes it."""

    def __init__(self, path: Path, lock: IO[bytes], guard: Guard | None) -> None:
        self.path = path
        self.job = path.name
        self._lock = lock
        self._guard = guard

    @classmethod
    def reserve(cls, logs: Path) -> Folder:
        """Make a folder with a new job id, unique among the running jobs of this machine and among the logs."""
        remove_stale()
        while True:
            job = "".join(secrets.choice(LETTERS) for _ in range(4))
            if (logs / job).exists():
                continue
            try:
                (root() / job).mkdir(mode=0o700)
            except FileExistsError:
                continue
            return cls.join(job, guarded=True)

    @classmethod
    def join(cls, job: str, guarded: bool = False) -> Folder:
        """Open the folder of an existing job id, or make it. guarded: it is removed, and the workers that know it
        are killed, even if this process is killed."""
        path = root() / job
        while True:
            path.mkdir(mode=0o700, exist_ok=True)
            try:
                lock = (path / "lock").open("wb")
                fcntl.flock(lock, fcntl.LOCK_SH)
                if os.path.samestat(os.fstat(lock.fileno()), (path / "lock").stat()):
                    break
                lock.close()
            except FileNotFoundError:
                pass  # another job took it for stale, as it was not held yet
        return cls(path, lock, Guard(path, _mark(path)) if guarded else None)

    @property
    def socket(self) -> Path:
        """The path by which workers know their agent; each worker has its own socket, see `line_of`."""
        return self.path / SOCKET

    @property
    def query(self) -> Path:
        return self.path / "launcher"

    @property
    def mark(self) -> str:
        """The variable in the environment of all processes that belong to the agent."""
        return _mark(self.path)

    @property
    def pulse(self) -> Path:
        return self.path / "pulse"

    def leave(self) -> None:
        """Release the folder, and remove it unless another process still holds it."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
        else:
            self.remove()

    @property
    def function(self) -> Path:
        """The file with the pickled function of `dadt.run`."""
        return self.path / "function"

    def remove(self) -> None:
        """Idempotent."""
        self._lock.close()
        shutil.rmtree(self.path, ignore_errors=True)
        if self._guard is not None:
            self._guard.release()


@functools.cache
def of_worker(world: World) -> Path:
    """The folder of a worker's job on its host. Without an agent, its ranks make it when they first need it."""
    if world.agent:
        return Path(world.agent).parent
    folder = Folder.join(world.job)
    atexit.register(folder.leave)
    return folder.path


def line_of(socket: Path | str, local_rank: int) -> Path:
    """The socket at which the agent listens to one worker of its host, and to nobody else."""
    return Path(f"{socket}.{local_rank}")


def _mark(path: Path) -> str:
    return f"DADT_AGENT={path / SOCKET}"


def root() -> Path:
    root = Path(f"/tmp/dadt-{os.getuid()}")
    root.mkdir(mode=0o700, exist_ok=True)
    status = root.lstat()
    if status.st_uid != os.getuid() or root.is_symlink():
        raise LaunchError(f"{root} belongs to another user: remove it, it must be yours")
    return root


def remove_stale() -> None:
    """Remove the folders that nobody holds any more."""
    for path in root().iterdir():
        if is_held(path):
            continue
        if not path.is_dir():
            path.unlink(missing_ok=True)  # the rendezvous of ranks that were killed
            continue
        with suppress(FileNotFoundError, BlockingIOError), (path / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # who is about to hold it waits, and then makes another
            shutil.rmtree(path, ignore_errors=True)
            continue
        if not is_held(path):
            shutil.rmtree(path, ignore_errors=True)  # it has no lock


def is_held(path: Path) -> bool:
    """Whether a process holds the folder, or has just made it and is about to."""
    try:
        with (path / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True  # its job is running
    except OSError:
        # No lock yet: its launcher may be about to take it.
        try:
            return time.time() - path.stat().st_mtime < FRESH_SECONDS
        except FileNotFoundError:
            return False
    return False
