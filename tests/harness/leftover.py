"""What tests leave behind on the machine: processes, shared-memory files, folders of jobs."""

from __future__ import annotations

import fcntl
import os
import re
import time
import uuid
from pathlib import Path

import psutil

from harness.patience import SETTLE_SECONDS

MARK = "DADT_TEST_SESSION"
SHARED_MEMORY = Path("/dev/shm")
JOBS = Path(f"/tmp/dadt-{os.getuid()}")


class Session:
    """The machine before the tests. Processes started from now on inherit a mark in their environment."""

    def __init__(self) -> None:
        self._before = _files()
        self.mark = os.environ[MARK] = uuid.uuid4().hex

    def leftovers(self) -> list[str]:
        """What is there that was not, and belongs to nobody who still runs; empty if all is clean."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (found := self._processes() + self._orphans()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _processes(self) -> list[str]:
        marked = []
        own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents()), *_helpers()}
        for process in psutil.process_iter():
            try:
                if process.pid in own or process.environ().get(MARK) != self.mark:
                    continue
                if process.status() != psutil.STATUS_ZOMBIE:
                    marked.append(f"process {process.pid}: {' '.join(process.cmdline())[:200]}")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # it has just ended, or is another user's
        return marked

    def _orphans(self) -> list[str]:
        fresh = _files() - self._before
        return [f"{path}: nobody uses it" for path in sorted(fresh) if not _is_used(path)]


def _helpers() -> set[int]:
    """Processes that end with this one."""
    return {
        child.pid
        for child in psutil.Process().children()
        if re.search(
            r"multiprocessing\.(resource_tracker|forkserver) import main|harness/forkserver.py", _command(child)
        )
    }


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # has ended, perhaps without having been waited for
        return ""


def _files() -> set[Path]:
    return {*SHARED_MEMORY.glob("*"), *JOBS.glob("*")}


def _is_used(path: Path) -> bool:
    """Whether a running job holds the folder, or a process maps the file."""
    if path.parent == SHARED_MEMORY:
        return any(str(path) in maps for maps in _all_maps())
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return not path.exists()
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _all_maps() -> list[str]:
    maps = []
    for entry in Path("/proc").glob("[0-9]*/maps"):
        try:
            maps.append(entry.read_text())
        except OSError:
            continue  # it has just ended, or is another user's
    return maps
