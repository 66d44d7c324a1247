"""`dadt report`: writes an HTML page about how a job went."""

from __future__ import annotations

from pathlib import Path

import click

from dadt.control import private_files
from dadt.errors import ConfigError
from dadt_cli.jobs.find import folder_of, log_dir_option, recorded_jobs
from dadt_cli.terminal.options import paths


@click.command()
@click.argument("job", default="latest", shell_complete=recorded_jobs)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    shell_complete=paths("file"),
    help="File to write.  [default: report.html in the job's folder]",
)
@log_dir_option
def report(job: str, output: str | None, log_dir: str) -> None:
    """Write a page about how JOB, or the latest job, went: throughput, waiting, step times, environment, failures.

    JOB is a job's id or folder. The page is a single file that needs no network.
    """
    from dadt_cli.report.page import page
    from dadt_cli.report.record import JobRecord

    trace, folder = folder_of(job, Path(log_dir), "events.jsonl")
    if not any(any(folder.glob(pattern)) for pattern in ("events.jsonl", "report.json", "rank*.log")):
        raise ConfigError(f"{folder}: holds nothing of a job of dadt's; give its id, or its folder in dadt-logs")
    path = Path(output) if output else folder / "report.html"
    text = page(JobRecord.read(folder, trace is not None), trace is not None)
    try:
        with private_files.open_file(path, "w", inner=not output, encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); name another file with -o") from error
    click.echo(path)
