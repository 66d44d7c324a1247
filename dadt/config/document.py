"""Reads a whole text file that the user has named."""

from __future__ import annotations

from pathlib import Path

from dadt.errors import ConfigError

LIMIT = 16 << 20
"""Largest size in bytes of a file with hosts or variables. A larger file is a mistake, or endless, such as /dev/zero.
"""


def read(path: Path, flag: str, limit: int = LIMIT) -> str:
    """Return the text of the file. flag: the option that named the file, for the error message. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise ConfigError(f"{flag} {path}: has more than {limit >> 10} KiB, which is no such file; give another")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: cannot be read ({getattr(error, 'strerror', error)})") from error
