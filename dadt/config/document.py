"""A text file of the user's, read whole."""

from __future__ import annotations

from pathlib import Path

from dadt.errors import ConfigError

LIMIT = 16 << 20
"""Bytes of a list of hosts or of variables; a longer one is another file, or has no end, as /dev/zero."""


def read(path: Path, flag: str, limit: int = LIMIT) -> str:
    """flag: by which the user has named it. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise ConfigError(f"{flag} {path}: has more than {limit >> 10} KiB, which is no such file; give another")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: cannot be read ({getattr(error, 'strerror', error)})") from error
