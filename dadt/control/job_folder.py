"""The folder of a running job on one host, named by the job's id: the agent's socket, steps and stacks."""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import secrets
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path

from dadt.control.guard import Guard
from dadt.errors import LaunchError
from dadt.world import World

LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"
"""Characters of a job's id, without those that are easily confused."""
FRESH_SECONDS = 60.0
FRESHEN_SECONDS = 3600.0
SOCKET = "agent"
ASK = ".ask"
"""The end of the name of the pipe through which a worker is asked for its stacks."""


class Folder:
    """/tmp/dadt-<uid>/<job>, readable by this user only. Its holders share a lock on the folder itself, so a folder
    whose lock is free is stale, and the next job removes it; systemd-tmpfiles leaves alone what is locked so."""

    def __init__(self, path: Path, lock: int, guard: Guard | None) -> None:
        """lock: a descriptor of the folder, by which it is locked."""
        self.removed = False
        """Somebody else has removed the folder since, with all that it held."""
        self._freshened = time.monotonic()
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
        return cls(path, _hold(path), Guard(path, _mark(path)) if guarded else None)

    def tend(self) -> None:
        """To be called now and then: keeps cleaners of /tmp away, and makes the folder again where it was removed all
        the same. Raises OSError, or LaunchError where it could not be this user's alone."""
        if not _is_at(self.path, self._lock):
            self.removed = True
            root()
            self._release()
            self._lock = _hold(self.path)
        if time.monotonic() - self._freshened > FRESHEN_SECONDS:
            self._freshened = time.monotonic()
            self.freshen()

    def freshen(self) -> None:
        """Let what it holds, and the other folders of its job on this host, look used: cleaners of /tmp remove what was
        used last many days ago. When files were written is left as it is, as scripts may ask for it."""
        job = self.job.partition(".")[0]
        folders = [path for path in self.path.parent.glob(f"{job}*") if path.name.partition(".")[0] == job]
        for path in (self.path.parent, *folders):
            _freshen(path)
            if path in folders:
                for folder, inner, files in os.walk(path):
                    for name in (*inner, *files):
                        _freshen(Path(folder, name))

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
        if self._lock < 0:
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._release()
        else:
            self.remove()

    @property
    def function(self) -> Path:
        """The file with the pickled function of `dadt.run`."""
        return self.path / "function"

    def remove(self) -> None:
        """Remove the folder with all that it holds, and end its guard, if it has one. May be called again."""
        self._release()
        shutil.rmtree(self.path, ignore_errors=True)
        if self._guard is not None:
            self._guard.release()

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


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
    """The folder of all of this user's jobs. Raises LaunchError where it is not this user's alone."""
    return private(Path(f"/tmp/dadt-{os.getuid()}"))


def private(path: Path) -> Path:
    """The folder, which is made unless it is there. Raises LaunchError where others could put something into it."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise LaunchError(f"{path} is no folder: remove it, it is to hold those of running jobs")
    if status.st_uid != os.getuid():
        raise LaunchError(f"{path} belongs to another user: remove it, it must be yours")
    if (mode := stat.S_IMODE(status.st_mode)) & 0o077:
        raise LaunchError(f"{path} is open to other users (mode {mode:04o}): `chmod 700 {path}`, or remove it")
    return path


def remove_stale() -> None:
    """Remove the folders that nobody holds any more."""
    for path in root().iterdir():
        if is_held(path):
            continue
        if not path.is_dir():
            path.unlink(missing_ok=True)  # the rendezvous of ranks that were killed
            continue
        with suppress(OSError):
            lock = _open(path)
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # who is about to hold it waits, and makes another
                shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def is_held(path: Path) -> bool:
    """Whether a process holds the folder, or has just made it and is about to."""
    try:
        lock = _open(path)
    except FileNotFoundError:
        return False
    except OSError:
        return _is_fresh(path)  # the socket of ranks that meet without an agent
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True  # its job is running
    finally:
        os.close(lock)
    with suppress(FileNotFoundError):
        return not any(path.iterdir()) and _is_fresh(path)
    return False


def _is_fresh(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime < FRESH_SECONDS
    except FileNotFoundError:
        return False


def _hold(path: Path) -> int:
    """Make the folder unless it is there, and share its lock. Returns its descriptor."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # another job took it for stale, as it was not held yet
            lock = _open(path)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_at(path, lock):
                return lock
            os.close(lock)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _is_at(path: Path, lock: int) -> bool:
    """Whether the folder of this descriptor is still the one of this path."""
    if lock < 0:
        return False
    try:
        return os.path.samestat(os.fstat(lock), path.lstat())
    except FileNotFoundError:
        return False


def _freshen(path: Path) -> None:
    with suppress(OSError):  # it has just gone
        os.utime(path, ns=(time.time_ns(), path.lstat().st_mtime_ns), follow_symlinks=False)
