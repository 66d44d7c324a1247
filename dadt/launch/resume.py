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
    root = Path(config.snapshot_dir) / logs.name if config.snapshot_dir else logs.absolute() / snapshots.FOLDER
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
        roots = Path(config.snapshot_dir).glob("*") if config.snapshot_dir else logs.glob(f"*/{snapshots.FOLDER}")
        for root in sorted(roots, key=lambda path: path.stat().st_mtime, reverse=True):
            if (newest := snapshots.newest(root)) is not None:
                return newest
        raise ConfigError(f"--resume {LAST}: no job in {logs} has a whole snapshot; take them with --snapshot-every")
    given = Path(config.resume)
    if given.name.isdigit() and given.is_dir():
        snapshots.about(given.absolute(), 0)
        return given.absolute()
    apart = [Path(config.snapshot_dir) / config.resume] if config.snapshot_dir else []
    for root in (*apart, logs / config.resume / snapshots.FOLDER, given / snapshots.FOLDER, given):
        if (newest := snapshots.newest(root)) is not None:
            return newest.absolute()
    raise ConfigError(f"--resume {config.resume}: has no whole snapshot in {logs}; take them with --snapshot-every")


def check(config: Config, ranks: int) -> None:
    """Raises ConfigError where there is one worker, or the snapshot is of another number."""
    if config.snapshot_every and ranks == 1:
        raise ConfigError("--snapshot-every: a single worker is left as plain python leaves it; give -np 2 or more")
    if config.resume and (size := snapshots.about(Path(config.resume), 0)["world_size"]) != ranks:
        raise ConfigError(f"--resume: the snapshot {config.resume} is one of {size} workers, and there are {ranks}")
