"""Which snapshot a job goes on from: `--resume`, and after a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dadt.config import Config
from dadt.control import snapshots
from dadt.errors import ConfigError

LAST = "last"


def configured(config: Config, logs: Path, restarts: int) -> Config:
    """With the folders that workers are told of. logs: the job's folder. Raises ConfigError where no snapshot is there
    to go on from."""
    root = Path(config.snapshot_dir) if config.snapshot_dir else logs.absolute() / snapshots.FOLDER
    own = snapshots.newest(root) if restarts else None
    asked = found(config) if config.resume and own is None else own
    config = replace(config, snapshot_dir=str(root) if config.snapshot_every else "", resume=str(asked or ""))
    if asked is not None and config.seed < 0:
        config = replace(config, seed=snapshots.about(asked, 0)["seed"])  # the script draws again what it has drawn
    return config


def found(config: Config) -> Path:
    """The snapshot that --resume names: by its job, its folder, or as the last one. Raises ConfigError."""
    logs = Path(config.log_dir).absolute()
    if config.resume == LAST:
        roots = sorted(logs.glob(f"*/{snapshots.FOLDER}"), key=lambda path: path.stat().st_mtime, reverse=True)
        roots = [Path(config.snapshot_dir), *roots] if config.snapshot_dir else roots
        for root in roots:
            if (newest := snapshots.newest(root)) is not None:
                return newest
        raise ConfigError(f"--resume {LAST}: no job in {logs} has a whole snapshot; take them with --snapshot-every")
    given = Path(config.resume)
    if given.name.isdigit() and given.is_dir():
        snapshots.about(given.absolute(), 0)
        return given.absolute()
    for root in (logs / config.resume / snapshots.FOLDER, given / snapshots.FOLDER, given):
        if (newest := snapshots.newest(root)) is not None:
            return newest.absolute()
    raise ConfigError(f"--resume {config.resume}: has no whole snapshot in {logs}; take them with --snapshot-every")


def check(config: Config, ranks: int) -> None:
    """Raises ConfigError where the snapshot is of another number of workers."""
    if config.resume and (size := snapshots.about(Path(config.resume), 0)["world_size"]) != ranks:
        raise ConfigError(f"--resume: the snapshot {config.resume} is one of {size} workers, and there are {ranks}")
