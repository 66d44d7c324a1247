"""Limits the memory that reading a file may take, since even a small file can make its reader allocate any amount."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dadt.control import proc
from dadt.errors import ConfigError

TIMES = 3
"""Memory that a comparison may take for tensors and contiguous copies of them, in multiples of the files' size."""
BESIDE = 3 << 30
"""Bytes that a comparison may take in addition to tensors: for names and for chunks being compared."""
PER_CORE = 16 << 20
"""Bytes allowed for the stack of each of torch's threads."""
SIGNS = ("allocate memory", "bad_alloc", "Cannot allocate")
"""Parts of torch's error messages when memory runs out."""


@contextmanager
def bounded(paths: Sequence[Path]) -> Iterator[None]:
    """Limit this process's memory during the block to what files of this size may need. Raises ConfigError if a file
    needs more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    sizes = sum(path.stat().st_size for path in paths if path.is_file())
    most = _used() + TIMES * sizes + BESIDE + PER_CORE * (os.cpu_count() or 1)
    bounds = [most, *(each for each in (soft, hard) if each != resource.RLIM_INFINITY)]
    with suppress(OSError, ValueError):  # some systems do not support RLIMIT_DATA
        resource.setrlimit(resource.RLIMIT_DATA, (min(bounds), hard))
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(sign in str(error) for sign in SIGNS):
            raise
        names = " and ".join(map(str, paths))
        raise ConfigError(f"{names}: what is in them takes more than {most >> 20:,} MiB of memory") from error
    finally:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _used() -> int:
    """Return the bytes of this process that already count towards its memory limit (RLIMIT_DATA)."""
    return int(proc.status("self", "VmData") or 0) << 10
