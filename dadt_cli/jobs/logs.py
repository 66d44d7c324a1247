"""`dadt logs`: prints what the workers of a job have printed, and follows further output."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from pathlib import Path

import click

from dadt.control.frame import CHUNK
from dadt.control.job_folder import is_held
from dadt.errors import ConfigError
from dadt.launch.local_jobs import Trace
from dadt.launch.monitor.printed import Printed
from dadt.launch.query import CallerLine
from dadt_cli.jobs.find import folder_of, log_dir_option, rank_option, recorded_jobs
from dadt_cli.terminal import console

LOG = re.compile(r"rank([0-9]{1,7})\.log")
LOOK_SECONDS = 0.2
"""Seconds between two checks whether files have grown."""


@click.command()
@click.argument("job", default="latest", shell_complete=recorded_jobs)
@rank_option
@click.option("-f", "--follow", is_flag=True, help="Follow the logs until the job ends.")
@log_dir_option
def logs(job: str, ranks: set[int] | None, follow: bool, log_dir: str) -> None:
    """Print the output of the workers of JOB, or of the latest job."""
    trace, folder = folder_of(job, Path(log_dir), "rank0.log")
    files = _files(folder, ranks)
    with ExitStack() as stack:
        line = stack.enter_context(called) if trace and follow and (called := trace.call()) else None
        tails = [stack.enter_context(LogTail(path)) for path in files]
        while line is not None:
            ended = line.ended(LOOK_SECONDS)
            for tail in tails:
                tail.show()
            if ended:
                line = stack.enter_context(again) if trace and (again := _called_again(trace)) else None
        for tail in tails:
            tail.show(last=True)


def _called_again(trace: Trace) -> CallerLine | None:
    """Return a new connection to the launcher of a job that may restart its workers; None once the launcher has
    ended."""
    while trace.launcher is not None and is_held(trace.launcher.parent):
        if (line := trace.call()) is not None:
            return line
        time.sleep(LOOK_SECONDS)
    return None


class LogTail:
    """Prints one rank's log file as it grows."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._prefix = f"[{path.stem.removeprefix('rank')}] ".encode()
        self._printed = Printed()

    def __enter__(self) -> LogTail:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def show(self, last: bool = False) -> None:
        """Print what has been added to the file. last: also print a last line without a line end."""
        while data := self._file.read(CHUNK):
            self._print(self._printed.feed(data, time.monotonic()))
        self._print(self._printed.finish() if last else self._printed.tick(time.monotonic()))

    def _print(self, lines: list[bytes]) -> None:
        if lines:
            console.lines("out", b"".join(self._prefix + line.rstrip(b" \r") + b"\n" for line in lines))


def _files(folder: Path, ranks: set[int] | None) -> list[Path]:
    """Return the log files of the ranks; those of all ranks if `ranks` is None. Raises ConfigError if a rank has no log
    file."""
    try:
        logs = ((LOG.fullmatch(path.name), path) for path in folder.iterdir())
        found = {int(name[1]): path for name, path in logs if name}
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read ({error.strerror})") from error
    if not found:
        raise ConfigError(f"{folder}: there are no logs of ranks")
    if missing := sorted((ranks or set()) - set(found)):
        raise ConfigError(f"--rank {missing[0]}: {folder} has ranks {min(found)} to {max(found)}")
    return [found[rank] for rank in sorted(found) if ranks is None or rank in ranks]
