"""The content of the page that `dadt report` writes, from a job's record. The HTML template in this folder sets the
layout."""

from __future__ import annotations

import math
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import dadt
from dadt.config import Config
from dadt.config.check import flag
from dadt.control import snapshots
from dadt.errors import ConfigError
from dadt.launch.ending.failure import signal_name, size
from dadt.launch.monitor.host_links import rate_text, share_text
from dadt.launch.monitor.watch import ESCAPES
from dadt.launch.start import saved_start
from dadt_cli.report import chart, progress
from dadt_cli.report.record import JobRecord, placed_in, verdict
from dadt_cli.report.timeline import Summary, parts, read
from dadt_cli.terminal.table import Table, figure, without_python
from dadt_cli.terminal.template import template

TEMPLATE = Path(__file__).with_name("report.html")
EVENTS = 200
STACKS = 8
"""Most ranks whose stacks the page shows."""
LATER_SECONDS = 300.0
"""A timeline written more than this many seconds after the job's end belongs to another job."""


def page(record: JobRecord, running: bool) -> str:
    """Return the page as HTML. Raises ConfigError if jinja2, the template library, is not installed."""
    report = record.report
    return template(TEMPLATE, "dadt report").render(
        job=report.get("job") or record.folder.name,
        folder=str(record.folder.resolve()),
        command=shlex.join(without_python(report.get("command") or [])),
        cwd=report.get("cwd", ""),
        verdict=verdict(report, running),
        size=_size(report),
        begin=_moment(report.get("begin")),
        end=_moment(report.get("end")),
        tiles=list(_tiles(report)),
        missing=record.missing,
        error=report.get("error", ""),
        failure=_failure(record) if report.get("failure") else None,
        snapshots=_snapshots(record, running),
        charts=progress.over_time(record),
        step_times=progress.step_times(report),
        tables=[e for e in (progress.step_table(report), _ranks(report), _links(report)) if e is not None],
        hot_spots=_hot_spots(report),
        borne=list(_events(record, _is_borne)),
        events=list(_events(record)),
        environment=[each for each in (_hosts(report), _settings(report)) if each is not None],
        version=dadt.__version__,
        made=_moment(time.time()),
        side=chart.SIDE,
    )


# The summary at the top of the page --------------------------------------------------------------------------------


def _size(report: Mapping[str, Any]) -> str:
    ranks = report.get("ranks", [])
    hosts = dict.fromkeys(rank.get("host") or "this host" for rank in ranks)
    if not ranks:
        return "no workers were placed"
    names = ", ".join(hosts) if len(hosts) <= 4 else f"{len(hosts)} hosts"
    return f"{len(ranks)} worker{'s' if len(ranks) > 1 else ''} on {names}"


def _tiles(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the key figures at the top of the page: name, value and an explanation."""
    config, ranks = report.get("config", {}), report.get("ranks", [])
    if "seconds" in report:
        yield "duration", chart.duration(report["seconds"]), "" if "end" in report else "so far"
    first: Mapping[str, Any] = next(iter(ranks), {})
    if (steps := first.get("steps")) is not None:
        late = first.get("delayed")
        yield "steps", f"{steps:,}", f"{late:,.0f} with late gradients" if late else ""
    rates = [rank["samples_per_second"] for rank in ranks if rank.get("samples_per_second")]
    if rates:
        yield "samples/s", figure(sum(rates)), "all ranks together" if len(rates) > 1 else ""
    waits = [rank["wait_fraction"] for rank in ranks if rank.get("wait_fraction") is not None]
    if waits:
        yield "waiting", f"{100 * statistics.mean(waits):.1f} %", "of the time, for communication"
    if steps and first.get("sent"):
        yield "sent", size(round(first["sent"] / steps)), "per step and rank"
    for name in ("algorithm", "executor", "compression"):
        if isinstance(value := config.get(name), str) and value != "none":
            fell_back = name == "algorithm" and any(rank.get("fell_back") for rank in ranks)
            yield name, value, "fell back to synchronous steps" if fell_back else ""


def _moment(seconds: float | None) -> str:
    if seconds is None:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""  # a damaged time, which is out of the range of dates


# Tables of ranks, failures and events ------------------------------------------------------------------------------


def _ranks(report: Mapping[str, Any]) -> Table | None:
    rows = []
    failure = report.get("failure") or {}
    for rank in report.get("ranks", []):
        # The failed rank may have been stopped by the launcher while it ended, so the exit code in the failure report
        # counts, not this one.
        first = rank.get("rank") == failure.get("rank") and failure.get("exit_code") is not None
        wait, rate, memory = (rank.get(name) for name in ("wait_fraction", "samples_per_second", "peak_memory"))
        rows.append(
            [
                str(rank.get("rank", "?")),
                rank.get("host") or "this host",
                rank.get("gpu") or "-",
                str(rank.get("pid") or "-"),
                _end(failure["exit_code"] if first else rank.get("exit_code")),
                f"{rank['steps']:,}" if rank.get("steps") is not None else "-",
                figure(rate) if rate else "-",
                f"{100 * wait:.1f} %" if wait is not None else "-",
                size(int(memory)) if memory else "-",
            ]
        )
    head = ["rank", "host", "gpu", "pid", "end", "steps", "samples/s", "waiting", "peak memory"]
    return Table("Ranks", head, rows, ["host", "gpu", "end"]) if rows else None


def _links(report: Mapping[str, Any]) -> Table | None:
    rows = []
    for link in report.get("links", []):
        known = {name: value for name, value in link.items() if value is not None}
        rows.append(
            [
                *(str(known.get(name, "?")) for name in ("source", "target")),
                *(size(int(known[name])) if name in known else "-" for name in ("sent", "received")),
                rate_text(known["rate"]) if "rate" in known else "-",
                share_text(known["resent_ratio"]) if "resent_ratio" in known else "-",
                f"{1000 * known['round_trip']:.2f} ms" if "round_trip" in known else "-",
            ]
        )
    head = ["from", "to", "sent", "received", "rate", "sent again", "round trip"]
    return Table("Links between hosts", head, rows, ["from", "to"]) if rows else None


def _end(code: int | None) -> str:
    if code is None:
        return "-"
    return "done" if code == 0 else signal_name(-code) if code < 0 else f"exit code {code}"


def _snapshots(record: JobRecord, running: bool) -> dict[str, Any] | None:
    """Return the steps of complete snapshots and, unless the job runs or has succeeded, the command that resumes it;
    None without snapshots and such a command."""
    config = record.report.get("config") or {}
    root, came_from = (_path(config.get(name)) for name in ("snapshot_dir", "resume"))
    found = snapshots.whole(Path(root)) if root else []
    done = running or record.report.get("exit_code") == 0
    command = "" if done else saved_start.command(record.folder, root, came_from)
    if not (found or command):
        return None
    steps = [f"{int(folder.name):,}" for folder in found if folder.name.isdecimal()]
    return {"steps": ", ".join(steps), "many": len(steps) > 1, "root": root, "came_from": came_from, "resume": command}


def _path(told: Any) -> str:
    """Return the value if it is valid as a path, otherwise an empty text."""
    return told if isinstance(told, str) and "\0" not in told else ""


def _failure(record: JobRecord) -> dict[str, Any]:
    """Return what the page shows about the failure of the rank that failed first."""
    told = record.report["failure"]
    rank, code, message = told.get("rank"), told.get("exit_code"), told.get("message") or ""
    head = f"Rank {rank} failed first" if rank is not None else "A worker failed"
    head += ", and the job was restarted" if record.report.get("exit_code") == 0 else ""
    how = [f"on {told['host']}" if told.get("host") else "", f"process {told['pid']}" if told.get("pid") else ""]
    how.append(("killed by " if code < 0 else "") + _end(code) if code else "")
    how.append(f"after {told['seconds']:.1f} s" if told.get("seconds") is not None else "")
    how.append(f"at step {told['step']}" if (told.get("step") or -1) >= 0 else "")
    if told.get("killed_for_memory"):
        message = "killed by the kernel for lack of memory"
    memory = f"peak memory {size(int(told['peak_memory']))}" if told.get("peak_memory") else ""
    limit = f" of {size(int(told['memory_limit']))}" if memory and told.get("memory_limit") else ""
    stopped = told.get("stopped") or []
    stacks = sorted({path.name for path in record.folder.glob("rank*.stacks")} - {f"rank{rank}.stacks"})
    return {
        "head": head,
        "cause": ": ".join(part for part in (told.get("type") or "", message) if part),
        "how": ", ".join(part for part in [*how, memory + limit] if part),
        "stopped": f"because of it were stopped: {_numbers(stopped)}" if stopped else "",
        "frames": [frame for frame in told.get("frames") or [] if frame.get("file")],
        "log": f"rank{rank}.log",
        "tail": _plain(record.tail(f"rank{rank}.log")) if rank is not None else "",
        "stacks": [(name, record.tail(name)) for name in stacks[:STACKS]],
    }


def _numbers(ranks: Sequence[int]) -> str:
    if len(ranks) > 8:
        return f"{len(ranks)} other ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _plain(text: str) -> str:
    """Return the text as a terminal finally shows it: without colours, and with only the last state of a progress
    bar."""
    shown = ESCAPES.sub(b"", text.encode(errors="replace")).decode(errors="replace")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in shown.split("\n"))


def _is_borne(event: Mapping[str, Any]) -> bool:
    """Return whether the event reports how the job continued after a loss or failure, such as by a restart."""
    return event["kind"] in ("regroup", "join", "restart") or str(event.get("text", "")).startswith("resumed:")


def _events(
    record: JobRecord, wanted: Callable[[Mapping[str, Any]], bool] = lambda event: True
) -> Iterator[tuple[str, str, str, str]]:
    """Yield for each event the time, the rank or host, the text, and whether the event is a warning or a failure."""
    begin = record.report.get("begin", 0.0)
    told = 0
    for event in filter(wanted, record.events):
        text, level = _event(event)
        if text and told < EVENTS:
            told += 1
            rank = event.get("rank")
            who = f"rank {rank}" if isinstance(rank, int) else str(event.get("host") or "")
            yield f"{event['time'] - begin:.1f} s", who, text, level


def _event(event: Mapping[str, Any]) -> tuple[str, str]:
    kind = event["kind"]
    if kind == "said":
        return str(event.get("text", "")), "warning" if event.get("level") == "warning" else ""
    if kind == "placed":
        return f"{len(placed_in(event))} workers placed", ""
    if kind == "failed":
        return f"{event.get('type')}: {event.get('message')}", "failure"
    if kind == "stop":
        return f"all workers are told to end: {event.get('why')}", ""
    if kind == "exit" and event.get("code"):
        return f"ended with code {event['code']}", "" if event.get("stopped") else "failure"
    if kind in ("agent lost", "unstarted"):
        return f"{kind}: {event.get('message')}", "failure"
    if kind == "regroup":
        return f"the others train on: {event.get('why')}", "warning"
    if kind == "join":
        return "a new worker has taken its place", ""
    if kind == "restart":
        return f"restart {event.get('count')}: {event.get('why')}", "warning"
    if kind == "link":
        return str(event.get("text", "")), "warning"
    if kind == "summary":
        return "training ended", ""
    return ("the job ended", "") if kind == "end" else ("", "")


# The timeline of all ranks -----------------------------------------------------------------------------------------


def _hot_spots(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows about where time went, from the timeline; without a timeline, the reason why there is
    none."""
    file = report.get("config", {}).get("timeline")
    if not isinstance(file, str) or not file:
        return {"why": "No timeline was recorded; dadt run --timeline FILE records one."}
    found = parts(Path(file))
    if not found:
        return {"why": f"{file} is not here: with several hosts it is on the host of rank 0."}
    summary = Summary()
    try:
        if found[0].stat().st_mtime > report.get("end", math.inf) + LATER_SECONDS:
            return {"why": f"{file} was written after this job: it is another one's."}
        read(found, summary)
    except ConfigError as error:
        return {"why": str(error)}
    except OSError as error:
        return {"why": f"{file} cannot be read ({error.strerror})"}
    verdict = [f"{line[0].upper()}{line[1:]}." for line in summary.verdict()]
    return {"why": "", "file": file, "tables": summary.tables(), "verdict": verdict}


# The environment of the job ----------------------------------------------------------------------------------------


def _hosts(report: Mapping[str, Any]) -> Table | None:
    names = ("hostname", "address", "interface", "dadt", "python", "torch", "cores")
    rows = []
    for host in report.get("hosts", []):
        gpus = ", ".join(map(str, host.get("gpus") or [])) or "none"
        gpus += f" ({', '.join(map(str, models))})" if (models := host.get("gpu_models")) else ""
        rows.append([host.get("host") or "this host", *(str(host.get(name) or "-") for name in names), gpus])
    return Table("Hosts", ["host", *names, "gpus"], rows, ["host", *names[:-1], "gpus"]) if rows else None


def _settings(report: Mapping[str, Any]) -> Table | None:
    known: dict[str, Any] = {field.name: field.default for field in fields(Config)}
    rows = []
    for name, value in report.get("config", {}).items():
        # Values in the report come from JSON, which has lists in place of tuples.
        default = list(known[name]) if isinstance(known.get(name), tuple) else known.get(name)
        if name in known and value != default:
            rows.append([flag(name), ", ".join(map(str, value)) if isinstance(value, list) else str(value)])
    title, head = "Settings that were given or chosen", ["setting", "value"]
    return Table(title, head, rows, left=head, note="All others have their defaults.") if rows else None
