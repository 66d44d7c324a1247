"""Which snapshot a job goes on from: `--resume`, and after a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dadt.config import Config
from dadt.config.check import AUTO, NEVER
from dadt.control import snapshots
from dadt.errors import ConfigError

LAST = "last"


def configured(config: Config, logs: Path, hosts: int, restarts: int, refused: bool) -> Config:
    """With the folders that workers are told of. logs: the job's folder. refused: the script could not go on from the
    snapshot. Raises ConfigError where no snapshot is there to go on from."""
    # Hosts may share no folder, and those that went on by themselves from the snapshots there would not come together.
    by_itself = config.max_restarts and (hosts <= 1 or config.snapshot_dir)
    if config.snapshot_every == AUTO and (config.algorithm == "gossip" or not (by_itself or config.resume)):
        config = replace(config, snapshot_every=NEVER)
    root = Path(config.snapshot_dir) / logs.name if config.snapshot_dir else logs.absolute() / snapshots.FOLDER
    own = snapshots.newest(root) if restarts and not refused else None
    if restarts:
        snapshots.set_aside(root, own, restarts)
    asked = found(config) if config.resume and own is None and not refused else own
    config = replace(config, snapshot_dir="" if config.snapshot_every == NEVER else str(root), resume=str(asked or ""))
    if asked is not None and config.seed < 0:
        config = replace(config, seed=snapshots.told(asked)["seed"])  # the script draws again what it has drawn
    return config


def settled(config: Config, ranks: int, restarts: int) -> Config:
    """What workers are told, once it is known how many there are. Raises ConfigError where the snapshot is one of
    fewer workers, unless a restart has chosen it."""
    if config.resume and (shares := snapshots.told(Path(config.resume))["shares"]) < ranks:
        if not restarts:
            raise ConfigError(
                f"--resume: the snapshot {config.resume} is one of {shares} workers, and there are {ranks}: give fewer"
            )
        if config.snapshot_dir:
            snapshots.set_aside(Path(config.snapshot_dir), None, restarts)
        config = replace(config, resume="")
    if ranks == 1 and config.resume and snapshots.shares(Path(config.resume)) > 1:  # its average is what it computes
        config = replace(config, algorithm="sync", compression="none")
    return config


def found(config: Config) -> Path:
    """The snapshot that --resume names: by its job, its folder, or as the last one. Raises ConfigError."""
    logs = Path(config.log_dir).absolute()
    if config.resume == LAST:
        roots = Path(config.snapshot_dir).glob("*") if config.snapshot_dir else logs.glob(f"*/{snapshots.FOLDER}")
        for root in sorted(roots, key=lambda path: path.stat().st_mtime, reverse=True):
            if (newest := snapshots.newest(root)) is not None:
                return newest
        where = config.snapshot_dir or logs
        raise ConfigError(f"--resume {LAST}: no job in {where} has a whole snapshot; take them with --snapshot-every")
    given = Path(config.resume)
    if given.name.isdigit() and given.is_dir():
        snapshots.told(given.absolute())
        return given.absolute()
    apart = [Path(config.snapshot_dir) / config.resume] if config.snapshot_dir else []
    for root in (*apart, logs / config.resume / snapshots.FOLDER, given / snapshots.FOLDER, given):
        if (newest := snapshots.newest(root)) is not None:
            return newest.absolute()
    if not any(path.exists() for path in (*apart, logs / config.resume, given)):
        raise ConfigError(f"--resume {config.resume}: there is no such job in {config.log_dir}, nor a snapshot")
    raise ConfigError(f"--resume {config.resume}: has no whole snapshot in {logs}; take them with --snapshot-every")
