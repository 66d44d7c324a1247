"""Small disks that can be filled, as root."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOUNT = ["mount", "-t", "tmpfs", "-o", "size=1m", "none"]
"""With the folder for it: a disk of 1 MiB."""


@contextmanager
def small_disk(path: Path) -> Iterator[None]:
    path.mkdir()
    subprocess.run([*MOUNT, path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(folder: Path) -> None:
    """Take all that is free on its disk."""
    try:
        with (folder / "full").open("wb", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass
    except OSError as error:
        if error.strerror != "No space left on device":
            raise
