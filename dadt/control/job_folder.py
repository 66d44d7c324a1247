"""The folder of a running job on one host, named by the job's id. It contains the agent's sockets, the workers' current
steps and their stack traces."""

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
"""Characters of which job ids consist; easily confused ones such as 0 and o are left out."""
FRESH_SECONDS = 60.0
FRESHEN_SECONDS = 3600.0
SOCKET = "agent"
ASK = ".ask"
"""Suffix of the name of the pipe through which the agent asks a worker to write the stack traces of its threads."""


class Folder:
    """The folder /tmp/dadt-<uid>/<job>, which only this user can access. Processes that use the folder hold a shared
    lock on it. A folder that no process has locked is stale, and the next job removes it. systemd-tmpfiles does not
    remove locked folders."""

    def __init__(self, path: Path, lock: int, guard: Guard | None) -> None:
        """lock: file descriptor of the folder, which holds the shared lock."""
        self.removed = False
        """Whether another process has removed the folder with its content, so that `tend` had to create it again."""
        self._freshened = time.monotonic()
        self.path = path
        self.job = path.name
        self._lock = lock
        self._guard = guard

    @classmethod
    def reserve(cls, logs: Path) -> Folder:
        """Create a folder with a new job id, unique among this machine's running jobs and among the job folders in
        `logs`."""
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
        """Open the folder of an existing job id, or create it. guarded: whether a guard process removes the folder and
        kills the job's workers if this process is killed."""
        path = root() / job
        return cls(path, _hold(path), Guard(path, _mark(path)) if guarded else None)

    def tend(self) -> None:
        """Mark the folder as recently used, and create it again if a cleaner of /tmp has removed it. Call regularly.
        Raises OSError, or LaunchError if other users could access the new folder."""
        if not _is_at(self.path, self._lock):
            self.removed = True
            root()
            self._release()
            self._lock = _hold(self.path)
        if time.monotonic() - self._freshened > FRESHEN_SECONDS:
            self._freshened = time.monotonic()
            self.freshen()

    def freshen(self) -> None:
        """Update the access times in this folder and in other folders of its job on this host, because cleaners of /tmp
        remove files that were not used for days. Modification times stay, since scripts may read them."""
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
        """Path from which the paths of the agent's sockets are derived: each worker connects to a socket of its own."""
        return self.path / SOCKET

    @property
    def query(self) -> Path:
        return self.path / "launcher"

    @property
    def mark(self) -> str:
        """Environment variable with its value, as "VARIABLE=value", which all processes of the agent have in their
        environment."""
        return _mark(self.path)

    @property
    def pulse(self) -> Path:
        return self.path / "pulse"

    def leave(self) -> None:
        """Release this process's lock on the folder, and remove the folder unless another process still uses it."""
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
        """Path of the file with the pickled function of `dadt.run`."""
        return self.path / "function"

    def remove(self) -> None:
        """Remove the folder with its content, and end its guard process if it has one. May be called repeatedly."""
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
    """Return the folder of a worker's job on its host. Without an agent, ranks create the folder on first use and
    remove it at exit."""
    if world.agent:
        return Path(world.agent).parent
    folder = Folder.join(world.job)
    atexit.register(folder.leave)
    return folder.path


def line_of(socket: Path | str, local_rank: int) -> Path:
    """Return the path of the socket at which the agent listens to the worker with this local rank only."""
    return Path(f"{socket}.{local_rank}")


def _mark(path: Path) -> str:
    return f"DADT_AGENT={path / SOCKET}"


def root() -> Path:
    """Return the folder of all of this user's jobs, creating it if necessary. Raises LaunchError if other users can
    access it."""
    return private(Path(f"/tmp/dadt-{os.getuid()}"))


def private(path: Path) -> Path:
    """Return the folder `path`, creating it if necessary. Raises LaunchError if it belongs to another user or other
    users can access it."""
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
    """Remove job folders that no process uses any more."""
    for path in root().iterdir():
        if is_held(path):
            continue
        if not path.is_dir():
            # The path is the leftover socket of ranks without an agent that were killed before they removed it.
            path.unlink(missing_ok=True)
            continue
        with suppress(OSError):
            lock = _open(path)
            with suppress(BlockingIOError):
                # A process that is about to lock the folder waits for this lock, finds the folder removed, and creates
                # a new one.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def is_held(path: Path) -> bool:
    """Return whether a process uses the folder, or may have just created it and be about to lock it."""
    try:
        lock = _open(path)
    except FileNotFoundError:
        return False
    except OSError:
        return _is_fresh(path)  # the path is not a folder but the socket at which ranks without an agent meet
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True  # another process has locked the folder, so the job is running
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
    """Create the folder unless it exists, and take a shared lock on it. Returns the folder's file descriptor."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # another job may remove the folder as stale before this process locks it
            lock = _open(path)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_at(path, lock):
                return lock
            os.close(lock)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _is_at(path: Path, lock: int) -> bool:
    """Return whether `path` is still the folder that is open as the descriptor `lock`."""
    if lock < 0:
        return False
    try:
        return os.path.samestat(os.fstat(lock), path.lstat())
    except FileNotFoundError:
        return False


def _freshen(path: Path) -> None:
    with suppress(OSError):  # the file or folder may have been removed just now
        os.utime(path, ns=(time.time_ns(), path.lstat().st_mtime_ns), follow_symlinks=False)
