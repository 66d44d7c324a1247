"""`dadt ps`: lists this user's jobs on this machine, or the ranks of one job."""

from __future__ import annotations

import shlex
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from dadt.control.job_folder import is_held
from dadt.errors import DadtError
from dadt.launch.ending.failure import size
from dadt.launch.local_jobs import Trace, traces
from dadt.launch.monitor.host_links import rate_text, share_text
from dadt_cli.jobs import past
from dadt_cli.jobs.find import describe, find, jobs, log_dir_option
from dadt_cli.terminal import console
from dadt_cli.terminal.table import figure, fitting, moment, table, without_python

HEAD = ["JOB", "SINCE", "WORKERS", "STEP", "STATE", "SCRIPT", "LOGS"]
RANK_HEAD = ["RANK", "HOST", "PID", "STEP", "STEPS/S", "SAMPLES/S", "WAITING", "MEMORY", "STATE"]
LINK_HEAD = ["FROM", "TO", "SENT", "RATE", "SENT AGAIN", "ROUND TRIP", "QUEUE"]
NO_LINKS = "no links between hosts are known: they are where ranks on several hosts exchange by tcp"
SCRIPT_WIDTH = 40
LEFT = ("JOB", "SINCE", "WORKERS", "HOST", "STATE", "SCRIPT", "LOGS")


@click.command()
@click.argument("job", required=False, shell_complete=jobs)
@click.option("--all", "every", is_flag=True, help="List jobs that have ended, too, and how.")
@click.option("-v", "--verbose", is_flag=True, help="With JOB, list the links between its hosts, too.")
@log_dir_option
def ps(job: str | None, every: bool, verbose: bool, log_dir: str) -> None:
    """List your jobs on this machine, or the ranks of JOB."""
    running, folder = traces(), Path(log_dir)
    if job is None:
        lines = _jobs(running, folder, every)
    elif all(trace.job != job for trace in running) and (folder / job / past.EVENTS).is_file():
        console.answer(past.sentence(folder / job))
        return
    else:
        lines = _job(job, verbose)
    for line in lines:
        click.echo(line)


def _jobs(running: Sequence[Trace], log_dir: Path, every: bool) -> list[str]:
    rows = [_row(trace) for trace in running]
    if every:
        found = map(past.facts, past.folders(log_dir, {trace.job for trace in running}))
        rows = [*map(_past_row, sorted(found, key=lambda facts: facts["begin"])), *rows]
    if not rows:
        return ["no job of yours runs on this machine" + (f", and none has left logs in {log_dir}" if every else "")]
    return fitting(HEAD, rows, LEFT, ("LOGS",))


def _job(job: str, verbose: bool) -> list[str]:
    trace = find(job)
    told = describe(trace)
    if told is None:
        return _ranks_here(trace)
    if not told["ranks"]:
        return [f"job {job}: {told['state']}"]
    return _ranks(told) + (["", *_links(told)] if verbose else [])


def _past_row(facts: Mapping[str, Any]) -> list[str]:
    begin = moment(facts["begin"]) if facts["begin"] else "-"
    end, program = facts["end"], _program(facts["command"])
    return [facts["job"], begin, facts["workers"], _span(facts["steps"]), end, program, facts["logs"]]


def _row(trace: Trace) -> list[str]:
    here = [trace.job, moment(trace.since), f"{len(trace.workers)} here", _span(trace.steps())]
    try:
        told = describe(trace)
    except DadtError:
        return [*here, "does not answer", "", ""]
    if told is None:
        return [*here, _state(trace), _script(trace), ""]
    ranks = told["ranks"]
    workers = f"{told['hosts']} host{'s' * (told['hosts'] != 1)} x {_each(ranks)}" if ranks else "-"
    steps = _span([rank["step"] for rank in ranks if not rank["lost"]])
    lost = sum(bool(rank["lost"]) for rank in ranks)
    state = told["state"] + f", {lost} lost" * bool(lost)
    return [trace.job, moment(told["begin"]), workers, steps, state, _program(told["command"]), told["logs"]]


def _ranks(told: Mapping[str, Any]) -> list[str]:
    rows = []
    for rank in told["ranks"]:
        speeds = [rank["steps_per_second"], rank["samples_per_second"]]
        rows.append(
            [
                str(rank["rank"]),
                rank["host"] or "-",
                str(rank["pid"] or "-"),
                str(rank["step"]) if rank["step"] >= 0 else "-",
                *("-" if speed is None else figure(speed) for speed in speeds),
                "-" if rank["wait_fraction"] is None else f"{100 * rank['wait_fraction']:.0f} %",
                size(rank["memory"]) if rank["memory"] else "-",
                _rank_state(rank),
            ]
        )
    return fitting(RANK_HEAD, rows, LEFT, ("SAMPLES/S", "MEMORY", "HOST", "PID"))


def _links(told: Mapping[str, Any]) -> list[str]:
    """Return a table of the links between hosts, in each direction."""
    rows = [
        [
            link["source"],
            link["target"],
            size(link["sent"]),
            "-" if link["recent_rate"] is None else rate_text(link["recent_rate"]),
            share_text(link["resent_ratio"]),
            f"{1000 * link['round_trip']:.2f} ms",
            size(link["queued"]),
        ]
        for link in told["links"]
    ]
    return fitting(LINK_HEAD, rows, ("FROM", "TO"), ("QUEUE", "ROUND TRIP")) if rows else [NO_LINKS]


def _rank_state(rank: Mapping[str, Any]) -> str:
    if rank["lost"]:
        return f"{rank['state']}, {time.time() - rank['lost']:.0f} s ago"
    return f"{rank['state']}" + (f", silent for {rank['seconds']:.0f} s" if rank["seconds"] > 10 else "")


def _ranks_here(trace: Trace) -> list[str]:
    """Return a table of the ranks on this machine, for a job whose launcher cannot be queried."""
    head = ["RANK", "PID", "STATE"]
    return table(head, [[str(rank), str(pid), _state(trace)] for rank, pid in sorted(trace.workers.items())], LEFT)


def _state(trace: Trace) -> str:
    # The launcher may still be starting, or have ended while its folder is not yet removed: in both cases it cannot be
    # queried.
    silent = trace.launcher is not None and is_held(trace.launcher.parent)
    return "starting, or at its end" if silent else "no launcher on this machine"


def _script(trace: Trace) -> str:
    """Return the command line of one of the job's workers on this machine."""
    for pid in trace.workers.values():
        try:
            return _program(Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1])
        except OSError:
            continue  # this worker has just ended: try the next one
    return ""


def _program(command: Sequence[str]) -> str:
    """Return a command in one short line, without the Python interpreter."""
    words = without_python(command)
    if list(words[:3]) == ["-m", "dadt_cli.bench.trainer", "--name"] and len(words) > 5:
        return f"dadt bench {words[5]}: {words[3]}"
    return textwrap.shorten(shlex.join(words), SCRIPT_WIDTH, placeholder=" ...")


def _each(ranks: list[Mapping[str, Any]]) -> str:
    """Return the number of workers per host: 2, or 1-2 if hosts have different numbers."""
    hosts = [rank["host"] for rank in ranks]
    return _span([hosts.count(host) for host in set(hosts)])


def _span(values: list[int]) -> str:
    if not values or max(values) < 0:
        return "-"
    least, most = max(0, min(values)), max(values)
    return str(most) if least == most else f"{least}-{most}"
