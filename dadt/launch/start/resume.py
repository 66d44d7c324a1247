"""Chooses the snapshot that a job resumes from, for `--resume` and after a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from dadt.config import Config
from dadt.config.check import AUTO, NEVER
from dadt.control import job_folder, snapshots
from dadt.errors import ConfigError
from dadt.launch.start import saved_start

LAST = "last"


class SnapshotFiles(Protocol):
    """Interface to the files of a job's snapshots on this host, which dadt/control/snapshots.py provides."""

    def newest(self, root: Path) -> Path | None: ...
    def set_aside(self, root: Path, last: Path | None, attempt: int) -> None: ...
    def told(self, folder: Path) -> dict[str, Any]: ...


def configured(
    config: Config, logs: Path, hosts: int, restarts: int, refused: bool, files: SnapshotFiles = snapshots
) -> Config:
    """Return the configuration with the snapshot folder and the snapshot to resume from. logs: the job's log folder.
    refused: whether the last attempt failed because the script could not resume from its snapshot. Raises ConfigError
    if no snapshot is found."""
    # Without a common folder, hosts would find different snapshots and resume at different steps.
    by_itself = config.max_restarts and (hosts <= 1 or config.snapshot_dir)
    if config.snapshot_every == AUTO and (config.algorithm == "gossip" or not (by_itself or config.resume)):
        config = replace(config, snapshot_every=NEVER)
    root = Path(config.snapshot_dir) / logs.name if config.snapshot_dir else logs.absolute() / snapshots.FOLDER
    own = files.newest(root) if restarts and not refused else None
    if restarts:
        files.set_aside(root, own, restarts)
    asked = source(config)[1] if config.resume and own is None and not refused else own
    config = replace(config, snapshot_dir="" if config.snapshot_every == NEVER else str(root), resume=str(asked or ""))
    if asked is not None and config.island == "auto" and (size := files.told(asked)["parts"]) > 1:
        # the first job has found that the script shards its model, and begun again in islands of this size
        config = replace(config, island=str(size))
    if asked is not None and config.seed < 0:
        # With the seed of the snapshot's job, the script draws the same random numbers as before.
        config = replace(config, seed=files.told(asked)["seed"])
    return config


def settled(config: Config, ranks: int, restarts: int, files: SnapshotFiles = snapshots) -> Config:
    """Return the configuration that workers receive, once their number is known. If the snapshot was taken by fewer
    workers than there are now, this raises ConfigError or, after a restart, does without the snapshot."""
    told = files.told(Path(config.resume)) if config.resume else {"shares": 0, "parts": 1}
    shares, island = told["shares"], told["parts"]
    if config.resume and shares < ranks:
        if not restarts:
            problem = f"the snapshot {config.resume} is one of {shares} workers, and there are {ranks}: give fewer"
            raise ConfigError(f"--resume: {problem}")
        if config.snapshot_dir:
            files.set_aside(Path(config.snapshot_dir), None, restarts)
        config = replace(config, resume="")
    # With a single worker or island nothing is averaged, so averages are neither delayed nor compressed.
    if ranks == island and config.resume and shares > island:
        config = replace(config, algorithm="sync", compression="none")
    return config


def source(config: Config) -> tuple[Path, Path]:
    """Return the log folder of the job that --resume names, and the snapshot to resume from. --resume names a job, or a
    snapshot's folder, or is `last`. Raises ConfigError."""
    logs = Path(config.log_dir).absolute()
    try:
        return _last(logs, config.snapshot_dir) if config.resume == LAST else _named(config.resume, logs, config)
    except OSError as error:  # the path cannot be read, for example because the name is too long
        raise ConfigError(f"--resume {config.resume}: cannot be read ({error.strerror})") from error


def _last(logs: Path, elsewhere: str) -> tuple[Path, Path]:
    if elsewhere:
        roots = {root: logs / root.name for root in Path(elsewhere).glob("*")}
    else:
        roots = {root: job for job in logs.glob("*") for root in saved_start.snapshots_of(job, "")}
    for root in sorted(filter(Path.is_dir, roots), key=lambda path: path.stat().st_mtime, reverse=True):
        if not _runs(root_job := roots[root]) and (newest := snapshots.newest(root)) is not None:
            return root_job, newest
    where = elsewhere or logs
    remedy = "take them with --snapshot-every"
    raise ConfigError(f"--resume {LAST}: no job in {where} that has ended has a whole snapshot; {remedy}")


def _named(name: str, logs: Path, config: Config) -> tuple[Path, Path]:
    given = Path(name).absolute()
    if given.name.isdigit() and given.is_dir():
        snapshots.told(given)
        return saved_start.job_folder(given, logs), given
    jobs = (logs / name, given)
    roots = [(root, job) for job in jobs for root in saved_start.snapshots_of(job, config.snapshot_dir)]
    for root, job in (*roots, (given, saved_start.job_folder(given / "0", logs))):
        if (newest := snapshots.newest(root)) is not None:
            if _runs(job):
                raise ConfigError(f"--resume {name}: still runs; end it first (dadt kill {job.name})")
            return job, newest.absolute()
    if not any(path.exists() for path in (*jobs, *(root for root, _ in roots))):
        remedy = "give the path of the job's folder if it was started elsewhere"
        raise ConfigError(f"--resume {name}: there is no such job in {config.log_dir}, nor a snapshot; {remedy}")
    raise ConfigError(f"--resume {name}: has no whole snapshot in {logs}; take them with --snapshot-every")


def _runs(job: Path) -> bool:
    """Return whether the job with this log folder is running on this machine."""
    return job_folder.is_held(job_folder.root() / job.name)
