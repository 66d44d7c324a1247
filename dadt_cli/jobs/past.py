"""Describes jobs that have ended, from the files in their log folders."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from dadt_cli.report.record import JobRecord, verdict
from dadt_cli.terminal.table import moment

EVENTS = "events.jsonl"


def folders(log_dir: Path, running: Collection[str]) -> list[Path]:
    """Return the folders of all jobs with logs in `log_dir`, except running jobs."""
    return [path.parent for path in log_dir.glob(f"*/{EVENTS}") if path.parent.name not in running]


def facts(folder: Path) -> dict[str, Any]:
    """Return a past job's begin, workers, steps, end, command and logs; unknown facts get neutral values such as 0 or
    "-"."""
    report = JobRecord.read(folder, running=False).report
    ranks = report.get("ranks", [])
    hosts = len({rank.get("host") for rank in ranks})
    steps = [rank["steps"] for rank in ranks if rank.get("steps") is not None]
    return {
        "job": folder.name,
        "begin": report.get("begin", 0.0),
        "workers": f"{hosts} host{'s' if hosts > 1 else ''} x {-(-len(ranks) // hosts)}" if ranks else "-",
        "steps": steps,
        "end": verdict(report, running=False)[0],
        "command": report.get("command", []),
        "logs": str(folder.resolve()),
    }


def sentence(folder: Path) -> str:
    """Return a sentence on how the job ended and where to read more."""
    job, report = folder.name, JobRecord.read(folder, running=False).report
    at = f" at {moment(report['end'])}" if "end" in report else ""
    return f"job {job} has ended{at}: {verdict(report, running=False)[0]}; dadt report {folder} says how it went"
