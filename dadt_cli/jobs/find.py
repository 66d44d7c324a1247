"""Finds the job and the ranks that the user of a command has named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from dadt.config.numbers import numbers
from dadt.control.frame import Frame
from dadt.errors import ConfigError, DadtError
from dadt.launch.local_jobs import Trace, traces
from dadt_cli.jobs import past
from dadt_cli.terminal.options import paths


def _ranks(ctx: click.Context, parameter: click.Parameter, text: str | None) -> set[int] | None:
    """Parse the value of an option such as 0,3-5 into ranks. None, if the option is not used, means all ranks."""
    if text is None:
        return None
    ranks = numbers(text)
    if ranks is None:
        raise ConfigError(f"--rank {text}: give ranks as 0,3-5")
    return ranks


rank_option = click.option(
    "--rank", "ranks", callback=_ranks, metavar="RANKS", help="Show only these ranks, such as 0,3-5."
)
LOG_DIR = "dadt-logs"
log_dir_option = click.option(
    "--log-dir",
    default=LOG_DIR,
    show_default=True,
    metavar="DIR",
    shell_complete=paths("dir"),
    help="Folder with the logs of jobs.",
)


def jobs(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return running jobs that begin with `incomplete`, for shell completion."""
    return [trace.job for trace in traces() if trace.job.startswith(incomplete)]


def recorded_jobs(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return running jobs, jobs with logs and `latest`, for shell completion."""
    log_dir = Path(ctx.params.get("log_dir") or LOG_DIR)
    logged = {path.name for path in _jobs(log_dir, past.EVENTS)}
    return sorted(job for job in {*logged, *jobs(ctx, parameter, ""), "latest"} if job.startswith(incomplete))


def find(job: str) -> Trace:
    """Find a running job by its id. Raises ConfigError if no such job runs, or has left processes, on this machine."""
    running = traces()
    for trace in running:
        if trace.job == job:
            return trace
    if (Path(LOG_DIR) / job / past.EVENTS).is_file():
        raise ConfigError(past.sentence(Path(LOG_DIR) / job))
    raise ConfigError(f"job {job}: {_there_is(running)}")


def _there_is(running: Sequence[Trace]) -> str:
    if not running:
        return "there is no such job; none of yours runs on this machine"
    return f"there is no such job; on this machine run {', '.join(trace.job for trace in running)}"


def describe(trace: Trace) -> dict[str, Any] | None:
    """Ask the job's launcher to describe the job. Returns None if the launcher is not on this machine.

    Raises DadtError if the launcher is on this machine but does not answer.
    """
    line = trace.call()
    if line is None:
        return None
    with line:
        try:
            for answer in line.ask(Frame("describe")):
                return answer.header
        except TimeoutError:
            remedy = f"dadt kill {trace.job}"
            raise DadtError(f"job {trace.job}: its launcher (pid {line.pid}) does not answer -> {remedy}") from None
    return None  # the launcher has ended before it answered


def folder_of(job: str, log_dir: Path, file: str) -> tuple[Trace | None, Path]:
    """Return the job, if it is running, and the folder of its logs. job: an id, a folder, or `latest` for the job whose
    `file` is the newest. Raises ConfigError if there is none."""
    running = {trace.job: trace for trace in traces()}
    if job == "latest":
        job = _latest(log_dir, file, list(running))
    elif "/" in job or (Path(job).is_dir() and job not in running and not (log_dir / job).is_dir()):
        if not Path(job).is_dir():
            raise ConfigError(f"{job}: there is no such folder; give a job's id, or its folder in dadt-logs")
        return running.get(Path(job).resolve().name), Path(job)
    if job in running and (told := describe(running[job])) is not None:
        return running[job], Path(told["logs"])
    folder = log_dir / job
    if not folder.is_dir():
        there = sorted({*running, *(path.name for path in _jobs(log_dir, file))})
        known = f"there are {', '.join(there)}" if there else "there are none"
        others = f"{known} (--log-dir elsewhere)"
        raise ConfigError(f"job {job}: it does not run here and has no logs in {log_dir}; {others}")
    return None, folder


def _latest(log_dir: Path, file: str, running: list[str]) -> str:
    """Return the newest job with logs in `log_dir`; if there are none in the default folder, the last of the running
    jobs. Raises ConfigError if there is no job."""
    folders = sorted(_jobs(log_dir, file), key=lambda folder: (folder / file).stat().st_mtime)
    jobs = [folder.name for folder in folders] or (running if log_dir == Path(LOG_DIR) else [])
    if not jobs:
        none = ", and no job runs; name the folder with --log-dir" if log_dir == Path(LOG_DIR) else ""
        raise ConfigError(f"there are no logs of a job in {log_dir}{none}")
    return jobs[-1]


def _jobs(log_dir: Path, file: str) -> Iterator[Path]:
    return (path.parent for path in log_dir.glob(f"*/{file}"))
