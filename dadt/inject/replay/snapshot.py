"""What a rank writes into a snapshot, and reads without running anything that it contains."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

# Bound here, before `torch.save` shows true weights to whoever saves.
from torch import load, save

from dadt.control import snapshots
from dadt.errors import ConfigError


def write(folder: Path, rank: int, content: dict[str, Any]) -> None:
    """Not part of the snapshot until `complete`. Raises OSError, or RuntimeError as torch does."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _half(folder, rank).open("wb") as file:
            save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        discard(folder, rank)
        raise


def complete(folder: Path, rank: int, told: dict[str, Any]) -> None:
    """Nothing where it could not be written. told: of the job. Raises OSError."""
    if _half(folder, rank).exists():
        snapshots.complete(folder, rank, _half(folder, rank), told)


def discard(folder: Path, rank: int) -> None:
    _half(folder, rank).unlink(missing_ok=True)
    with suppress(OSError):  # others still have something in it
        folder.rmdir()


def _half(folder: Path, rank: int) -> Path:
    return snapshots.content_of(folder, rank).with_suffix(".half")


def read(folder: Path, rank: int) -> dict[str, Any]:
    """Raises ConfigError where it is not there, torn, damaged, or of another version."""
    told, path = snapshots.about(folder, rank), snapshots.content_of(folder, rank)
    if snapshots.digest(path) != told["sha256"]:
        raise ConfigError(f"{path}: is damaged (its checksum differs): resume from another snapshot")
    content = load(path, map_location="cpu", weights_only=True)
    assert isinstance(content, dict)
    return content
