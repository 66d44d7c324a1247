"""What a rank writes into a snapshot, and reads without running anything that it contains."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# Bound here, before `torch.save` shows true weights to whoever saves.
from torch import load, save

from dadt.control import snapshots
from dadt.errors import ConfigError


def write(folder: Path, rank: int, content: dict[str, Any], told: dict[str, Any]) -> None:
    """Raises OSError, or RuntimeError as torch does. told: of the job."""
    folder.mkdir(parents=True, exist_ok=True)
    half = snapshots.content_of(folder, rank).with_suffix(".half")
    try:
        with half.open("wb") as file:
            save(content, file)
            file.flush()
            os.fsync(file.fileno())
        snapshots.complete(folder, rank, half, told)
    finally:
        half.unlink(missing_ok=True)


def read(folder: Path, rank: int) -> dict[str, Any]:
    """Raises ConfigError where it is not there, torn, damaged, or of another version."""
    told, path = snapshots.about(folder, rank), snapshots.content_of(folder, rank)
    if snapshots.digest(path) != told["sha256"]:
        raise ConfigError(f"{path}: is damaged (its checksum differs): resume from another snapshot")
    content = load(path, map_location="cpu", weights_only=True)
    assert isinstance(content, dict)
    return content
