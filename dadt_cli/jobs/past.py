"""Jobs that have ended, by what they have left in the folder of their logs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from dadt_cli.report.record import JobRecord, verdict
from dadt_cli.terminal.table import moment

EVENTS = "events.jsonl"


def folders(log_dir: Path, running: Collection[str]) -> list[Path]:
    """The folders of all jobs with logs here, except those that run."""
    return [path.parent for path in log_dir.glob(f"*/{EVENTS}") if path.parent.name not in running]


def facts(folder: Path) -> dict[str, Any]:
    """When it began, its workers, steps, end, command and logs; what is not known is left out."""
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
    """How the job ended, and where there is more."""
    job, report = folder.name, JobRecord.read(folder, running=False).report
    at = f" at {moment(report['end'])}" if "end" in report else ""
    return f"job {job} has ended{at}: {verdict(report, running=False)[0]}; dadt report {folder} says how it went"
