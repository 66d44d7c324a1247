"""Writes `report.json`, which describes a job for other programs, while the job runs and after its end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from dadt.config import Config, version
from dadt.control import private_files
from dadt.errors import DadtError
from dadt.launch.ending.failure import Failure
from dadt.launch.ending.outcome import Outcome
from dadt.launch.hosts.slot import Slot
from dadt.launch.members.node import Node
from dadt.launch.monitor.journal import Journal
from dadt.launch.monitor.watch import Gauge, Watch
from dadt.launch.start.plan import Plan

VERSION = 1
"""Version of the file format, increased when a field changes its meaning or is removed."""
SECONDS = 2.0
"""Minimum seconds between two reports while the job runs."""
SHARE = 0.01
"""Largest share of the launcher's time that may be spent on writing reports. With very many ranks, reports are written
less often."""


class Interim:
    """A view of the running job that rewrites the report regularly."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._due = 0.0

    def tick(self) -> float:
        if (now := time.monotonic()) >= self._due:
            self._write()
            self._due = now + max(SECONDS, (time.monotonic() - now) / SHARE)
        return self._due - now

    def close(self) -> None:
        """Do nothing, as `JobReport.close` writes the last report."""


class JobReport:
    """The records of a job in its log folder: the journal of events and the report. Errors while writing them are
    reported to the user, but do not stop the job."""

    def __init__(self, plan: Plan, logs: Path, warn: Callable[[str], None]) -> None:
        """warn: called with a text for the user if a file cannot be written."""
        self.journal = Journal(logs / "events.jsonl", warn)
        self._plan = plan
        self._logs = logs
        self._warn = warn
        self._begin = time.time()
        self._config = plan.config
        self._nodes: Sequence[Node] = ()
        self._slots: Sequence[Slot] = ()
        self._watch: Watch | None = None
        self._outcome = Outcome(seconds=0.0)
        """The outcome of the job; until the job has run, an outcome without any facts."""
        self._restarts: list[dict[str, Any]] = []
        """For each restart: its time, and the reason why the attempt before it failed."""
        self._error = "dadt itself failed"
        self._exit_code = 1
        self._over = False
        self._warned = False
        self.journal.write("start", job=logs.name, command=list(plan.command), dadt=version.VERSION)

    def placed(self, config: Config, nodes: Sequence[Node], slots: Sequence[Slot], watch: Watch) -> None:
        """Record on which hosts and GPUs the workers were placed."""
        self._config, self._nodes, self._slots, self._watch = config, nodes, slots, watch
        ranks = [{name: getattr(slot, name) for name in ("rank", "host", "local_rank", "gpu")} for slot in slots]
        self.journal.write("placed", ranks=ranks, algorithm=config.algorithm, executor=config.executor)

    @property
    def began(self) -> bool:
        """Whether the workers have been placed on hosts."""
        return self._watch is not None

    def restarts(self, count: int, why: str) -> None:
        """Record why an attempt to run the job failed, and that restart number `count` follows."""
        self._restarts.append({"time": time.time(), "why": why})
        self.journal.write("restart", count=count, why=why)

    def ended(self, outcome: Outcome) -> None:
        """Record the outcome of a job that ran: it succeeded, a worker failed, or it was ended from outside."""
        self._outcome, self._exit_code, self._error = outcome, outcome.exit_code, ""

    def failed(self, error: DadtError) -> None:
        """Record the error of a job that ended without an outcome."""
        self._exit_code, self._error = error.exit_code, str(error)

    def interim(self) -> Interim:
        return Interim(self._write)

    def close(self) -> None:
        self.journal.write("end", exit_code=self._exit_code)
        self.journal.close()
        self._over = True
        self._write()

    def _write(self) -> None:
        """Replace the report atomically, so that readers always see a complete one."""
        path = self._logs / "report.json"
        new = path.with_name(f"{path.name}.new")
        try:
            with private_files.open_file(new, "w", inner=True) as file:
                file.write(json.dumps(self._data(), indent=2) + "\n")
            new.replace(path)
        except OSError as error:
            if not self._warned:
                self._warn(f"{path} could not be written: {error.strerror}")
            self._warned = True

    def _data(self) -> dict[str, Any]:
        now, told = time.time(), self._outcome
        gauges = self._watch.gauges if self._watch is not None else []
        return {
            "version": VERSION,
            "dadt": version.VERSION,
            "job": self._logs.name,
            "command": list(self._plan.command),
            "cwd": self._plan.cwd,
            "begin": self._begin,
            "end": now if self._over else None,
            "seconds": now - self._begin,
            "exit_code": self._exit_code if self._over else None,
            "signal": told.signal or None,
            "error": (self._error or None) if self._over else None,
            "failure": _failure(told.failure) if told.failure is not None else None,
            "preemption": told.preemption.text if told.preemption is not None else None,
            "resume": told.resume or None,
            "restarts": self._restarts,
            "losses": [asdict(loss) for loss in (self._watch.losses if self._watch is not None else ())],
            "regroups": list(self._watch.generations if self._watch is not None else ()),
            "config": {field.name: _value(field.name, getattr(self._config, field.name)) for field in fields(Config)},
            "hosts": [_host(node) for node in self._nodes],
            "ranks": [_rank(slot, gauge) for slot, gauge in zip(self._slots, gauges, strict=True)],
            "links": self._watch.links.describe(time.monotonic()) if self._watch is not None else [],
        }


def _value(name: str, value: Any) -> Any:
    """Return a setting's value for the report. Of forwarded environment variables only the names are returned, as their
    values may be secret."""
    return [each.partition("=")[0] for each in value] if name == "forward" else value


def _host(node: Node) -> dict[str, Any]:
    told = node.report
    names = ("hostname", "version", "python", "torch", "cores", "gpus", "gpu_models")
    return {
        "host": node.name,
        "address": node.address,
        "interface": node.interface,
        **{("dadt" if name == "version" else name): told.get(name) for name in names},
    }


def _rank(slot: Slot, gauge: Gauge) -> dict[str, Any]:
    summary: Mapping[str, Any] = gauge.summary
    seconds = summary.get("seconds", 0.0)
    mean = gauge.mean_speed()
    rate = summary["samples"] / seconds if seconds and "samples" in summary else mean.samples if mean else None
    return {
        "rank": slot.rank,
        "host": slot.host,
        "local_rank": slot.local_rank,
        "gpu": slot.gpu,
        "pid": gauge.member.pid or None,
        "exit_code": gauge.code,
        "steps": int(summary.get("steps", max(0, gauge.member.step))),
        "delayed": summary.get("delayed"),
        "wait_fraction": summary.get("wait_fraction", mean.wait if mean else None),
        "samples": summary.get("samples", gauge.samples),
        "samples_per_second": rate,
        "peak_memory": gauge.peak_memory or None,
        "sent": gauge.numbers.get("sent"),
        "fell_back": gauge.numbers.get("fell_back"),
        "differed": gauge.numbers.get("differed"),
        "step_times": gauge.numbers.get("step_times"),
    }


def _failure(failure: Failure) -> dict[str, Any]:
    ending, record = failure.ending, failure.record
    return {
        "rank": ending.rank,
        "host": failure.host,
        "pid": failure.pid,
        "exit_code": failure.exit_code if ending.stopped else ending.code,
        "seconds": failure.seconds,
        "step": failure.step if failure.step is not None else ending.step,
        "type": record.type if record is not None else None,
        "message": _message(failure),
        "frames": [dict(frame) for frame in record.frames] if record is not None else [],
        "thread": record.thread if record is not None else "",
        "peak_memory": ending.peak_memory,
        "memory_limit": ending.memory_limit,
        "killed_for_memory": ending.killed_for_memory,
        "stopped": list(failure.stopped),
        "log": str(failure.log),
        "stacks": [str(path) for path in failure.stacks],
    }


def _message(failure: Failure) -> str:
    if failure.blame is not None:
        return failure.blame.cause
    return failure.record.message if failure.record is not None else failure.last_words
