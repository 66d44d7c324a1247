"""The file names and first bytes of a timeline and of its parts (one part per rank), and a check that the files can be
written."""

from __future__ import annotations

import os
from pathlib import Path

from dadt.control import private_files
from dadt.errors import ConfigError

HEAD = b'{"displayTimeUnit":"ms","otherData":{"program":"dadt"},"traceEvents":[\n'
PART_HEAD = b"[\n"
"""First bytes of a part, which open a JSON array. Trace viewers accept an array without its end, so the parts of a
failed job can be viewed as well."""


def part(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.rank{rank}")


def check(path: Path) -> None:
    """Raise ConfigError if no timeline can be written at this path. Creates nothing."""
    try:
        if path.is_dir():
            raise ConfigError(f"--timeline {path}: this is a folder; give a file, as timeline.json")
        there = next(each for each in path.absolute().parents if each.exists())
        if not there.is_dir():
            raise ConfigError(f"--timeline {path}: cannot be written ({there} is no folder); give another place")
        if not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(f"--timeline {path}: {there} cannot be written to; give another place")
        if path.exists() and path.stat().st_size:
            with path.open("rb") as file:
                if file.read(len(HEAD)) != HEAD:
                    raise ConfigError(f"--timeline {path}: this file is no timeline; give another name, or remove it")
    except OSError as error:
        raise ConfigError(f"--timeline {path}: cannot be written ({error.strerror})") from error


def prepare(path: Path) -> None:
    """Create the folder of a timeline. Raises ConfigError if no timeline can be written there."""
    check(path)
    try:
        private_files.make_folder(path.parent)
    except OSError as error:
        raise ConfigError(f"--timeline {path}: cannot be written ({error.strerror})") from error
