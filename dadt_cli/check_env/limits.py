"""Checks limits set by the kernel, a container or an administrator."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from dadt.control import machine
from dadt.control.job_folder import root
from dadt.errors import LaunchError
from dadt.launch.ending.failure import size
from dadt_cli.check_env import rdma
from dadt_cli.check_env.check import Check, CheckOptions, fail, good, refused, warn

SHARED = Path("/dev/shm")
LEAST_SHARED, ENOUGH_SHARED = 64 << 20, 1 << 30
"""Bytes of /dev/shm below which the check fails, and below which it warns. Docker's default is 64 MiB, most of which
one batch of images fills."""
ENOUGH_FILES = 4096
ENOUGH_PROCESSES = 1024
LEAST_DISK = 1 << 30


def checks(asked: CheckOptions) -> Iterator[Check]:
    yield _shared_memory()
    yield _files()
    yield _processes()
    yield _locked_memory()
    yield _core_files()
    yield _folder()
    yield _disk(Path(asked.cwd))


def _shared_memory() -> Check:
    hint = "docker run --shm-size=8g, or --ipc=host; Kubernetes: emptyDir of medium Memory. DataLoader workers need it"
    if not SHARED.is_dir():
        return fail("/dev/shm", "is not there", "mount a tmpfs there: DataLoader workers and NCCL need it")
    whole, _, free = shutil.disk_usage(SHARED)
    value = f"{size(whole)}, {size(free)} free"
    if not os.access(SHARED, os.W_OK):
        return fail("/dev/shm", f"{value}, but not writable", "chmod 1777 /dev/shm")
    if whole < LEAST_SHARED:
        return fail("/dev/shm", value, hint)
    if whole < ENOUGH_SHARED:
        return warn("/dev/shm", value, hint)
    if free < ENOUGH_SHARED:
        return warn("/dev/shm", value, "look into it, and remove what killed processes have left there")
    return good("/dev/shm", value)


def _files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < ENOUGH_FILES:
        how = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
        if hard != resource.RLIM_INFINITY and hard <= soft:
            how = "docker run --ulimit nofile=65536, or nofile in /etc/security/limits.conf"
        return warn("open files", soft, f"{how}: many hosts, or DataLoader workers, need more")
    return good("open files", "unlimited" if soft == resource.RLIM_INFINITY else soft)


def _processes() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [limit for limit in (soft, machine.process_limit()) if limit > 0]
    least = min(limits, default=0)
    if least and least < ENOUGH_PROCESSES:
        hint = "docker run --pids-limit 32768, or ulimit -u: each thread of torch counts"
        return warn("processes", f"{least} processes and threads", hint)
    return good("processes", f"{least} processes and threads" if least else "unlimited")


def _locked_memory() -> Check:
    """Check how much memory may be locked. Only RDMA needs locked memory, for its buffers."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and rdma.devices():
        hint = "ulimit -l unlimited (docker run --ulimit memlock=-1): RDMA locks its buffers into memory"
        return warn("locked memory", size(soft), hint)
    value = "unlimited" if soft == resource.RLIM_INFINITY else f"{size(soft)} (only RDMA needs more)"
    return good("locked memory", value)


def _core_files() -> Check:
    """Check whether a crashed worker may leave a core file for a debugger; the file is as large as the worker's
    memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_CORE)
    if soft == 0:
        return good("core files", "none (ulimit -c unlimited, to look into a crash with gdb)")
    return good("core files", "unlimited" if soft == resource.RLIM_INFINITY else f"up to {size(soft)}")


def _folder() -> Check:
    try:
        path = root()
    except LaunchError as error:
        return refused("job folder", str(error), "remove it")
    except OSError as error:
        return fail("job folder", f"/tmp cannot be written ({error.strerror})", "make it writable: chmod 1777 /tmp")
    if not os.access(path, os.W_OK):
        return fail("job folder", f"{path} cannot be written", f"chmod 700 {path}")
    return good("job folder", path)


def _disk(cwd: Path) -> Check:
    """Check the free space where a job's logs go if --log-dir is not set."""
    folder = cwd if cwd.is_dir() else Path("/tmp")
    free = shutil.disk_usage(folder).free
    value = f"{size(free)} free in {folder}"
    if free < LEAST_DISK:
        return warn("disk", value, "make room, or give --log-dir DIR elsewhere")
    return good("disk", value)
