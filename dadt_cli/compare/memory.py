"""The memory that reading files may take: a small file can ask for any amount."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dadt.errors import ConfigError

TIMES = 3
"""Memory that the comparison may take, in units of the files' size: their tensors, and copies that lie in one piece."""
BESIDE = 3 << 30
"""Bytes beside that: names, and what is compared at a time."""
PER_CORE = 16 << 20
"""Bytes of the stack of each of torch's threads."""
SIGNS = ("allocate memory", "bad_alloc", "Cannot allocate")
"""Parts of what torch says where the memory ends."""


@contextmanager
def bounded(paths: Sequence[Path]) -> Iterator[None]:
    """Inside, this process gets no more memory than files of this size warrant. Raises ConfigError where one asks for
    more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    sizes = sum(path.stat().st_size for path in paths if path.is_file())
    most = _used() + TIMES * sizes + BESIDE + PER_CORE * (os.cpu_count() or 1)
    bounds = [most, *(each for each in (soft, hard) if each != resource.RLIM_INFINITY)]
    with suppress(OSError, ValueError):  # a system that knows no such limit
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
    """Bytes of this process that count against the limit already."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    found = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmData:")]
    return int(found[0]) << 10 if found else 0
