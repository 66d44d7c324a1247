"""`dadt stacks`: shows where every rank of a running job is in its Python code."""

from __future__ import annotations

import click

from dadt.control.frame import Frame
from dadt.errors import DadtError
from dadt_cli.jobs.find import find, jobs, rank_option

SECONDS = 10.0


@click.command()
@click.argument("job", shell_complete=jobs)
@rank_option
def stacks(job: str, ranks: set[int] | None) -> None:
    """Print the Python stacks of every rank of JOB. The job keeps running."""
    trace = find(job)
    line = trace.call()
    if line is None:
        raise DadtError(f"job {job}: its launcher is not on this machine; ask there")
    found: list[Frame] = []
    with line:
        try:
            for frame in line.ask(Frame("stacks", {"ranks": sorted(ranks) if ranks is not None else None}), SECONDS):
                if frame.kind == "end":
                    break
                found.append(frame)
        except TimeoutError:
            raise DadtError(f"job {job}: its launcher (pid {line.pid}) does not answer -> dadt kill {job}") from None
    for frame in sorted(found, key=lambda frame: (frame["rank"], frame["pid"])):
        where = f" on {frame['host']}" if frame["host"] else ""
        click.echo(f"rank {frame['rank']}{where}, pid {frame['pid']}: {frame['state']}")
        if frame["problem"]:
            click.echo(f"  {frame['problem']}")
        click.echo(frame.body.decode(errors="replace").rstrip() + "\n" if frame.body else "")
