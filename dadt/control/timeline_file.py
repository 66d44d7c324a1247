"""The files of a timeline: the names and headers of its parts, and a check that they can be written."""

from __future__ import annotations

import os
from pathlib import Path

from dadt.control import private_files
from dadt.errors import ConfigError

HEAD = b'{"displayTimeUnit":"ms","otherData":{"program":"dadt"},"traceEvents":[\n'
PART_HEAD = b"[\n"
"""The format allows an array without its end, so the parts of a failed job can be opened as well."""


def part(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.rank{rank}")


def check(path: Path) -> None:
    """Raises ConfigError if no timeline can be written there."""
    try:
        if path.is_dir():
            raise ConfigError(f"--timeline {path}: this is a folder; give a file, as timeline.json")
        private_files.make_folder(path.parent)
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"--timeline {path}: {path.parent} cannot be written to; give another place")
        if path.exists() and path.stat().st_size:
            with path.open("rb") as file:
                if file.read(len(HEAD)) != HEAD:
                    raise ConfigError(f"--timeline {path}: this file is no timeline; give another name, or remove it")
    except OSError as error:
        raise ConfigError(f"--timeline {path}: cannot be written ({error.strerror})") from error
