"""Reads a job's log folder for a report. Damaged or missing parts are named in the report and left out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dadt.launch.ending.failure import signal_name

NUMBER = (int, float)


def _all(kind: Any, names: str) -> dict[str, Any]:
    """Return the shape of a mapping in which the values under these names (separated by spaces) are of type `kind`."""
    return dict.fromkeys(names.split(), kind)


RANK = {
    **_all(int, "rank local_rank pid exit_code steps"),
    **_all(str, "host gpu"),
    **_all(NUMBER, "delayed wait_fraction samples samples_per_second peak_memory sent fell_back differed"),
    "step_times": {"counts": dict, "seconds": NUMBER},
}
HOST = {**_all(str, "host hostname address interface dadt python torch"), "cores": int, **_all(list, "gpus gpu_models")}
LINK = {
    **_all(str, "source target"),
    **_all(NUMBER, "sent received resent resent_ratio rate round_trip queued"),
}
FAILURE = {
    **_all(int, "rank pid exit_code step"),
    **_all(str, "host type message thread"),
    **_all(NUMBER, "seconds peak_memory memory_limit"),
    "frames": [{"file": str, "line": (int, str), "function": str, "text": str}],
    "killed_for_memory": bool,
    "stopped": [int],
    "stacks": [str],
}
REPORT = {
    **_all(str, "dadt job cwd error"),
    **_all(NUMBER, "begin end seconds"),
    **_all(int, "exit_code signal"),
    "command": [str],
    "failure": FAILURE,
    "config": dict,
    "hosts": [HOST],
    "ranks": [RANK],
    "links": [LINK],
}
"""The keys of report.json that are read, with their types. Any value may be null."""
LARGEST = 2.0**63
"""Numbers of this size or more are treated as damaged, since no real value comes near."""
TAIL_BYTES = 16 << 10
TAIL_LINES = 40


class Moment(NamedTuple):
    """A record of how far a rank had come; steps, samples and waiting are counted from the rank's start."""

    time: float
    """Time on the launcher's clock, in seconds since 1970."""
    step: float
    samples: float
    waited: float
    """Seconds that the rank has spent waiting for communication since its start."""
    clock: float
    """Time on the rank's own clock, in seconds."""


@dataclass
class JobRecord:
    """The record of a job, read from its log folder."""

    folder: Path
    report: dict[str, Any] = field(default_factory=dict)
    """The content of report.json, or what can be derived from events; unknown keys are missing."""
    events: list[dict[str, Any]] = field(default_factory=list)
    series: dict[int, list[Moment]] = field(default_factory=dict)
    """Records of how far each rank had come, by rank, in order of time."""
    missing: list[str] = field(default_factory=list)
    """A sentence for each part of the record that should exist and does not."""

    @classmethod
    def read(cls, folder: Path, running: bool) -> JobRecord:
        """Read the record of a job from its log folder. running: the job still runs, so a report may not exist yet."""
        record = cls(folder)
        record.events = [event for event in record._lines("events.jsonl") if _is_event(event)]
        record._read_series()
        record._read_report(running)
        return record

    def tail(self, name: str) -> str:
        """Return the last lines of a file in the folder, or a sentence if it cannot be read."""
        try:
            with (self.folder / name).open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        return "\n".join(text.rstrip("\n").split("\n")[-TAIL_LINES:])

    def _read_report(self, running: bool) -> None:
        """Read report.json. While the job runs, or if its launcher was killed, the file contains the launcher's last
        interim report."""
        path = self.folder / "report.json"
        told = _of_events(self.events)
        try:
            data = json.loads(path.read_bytes())
        except OSError as error:
            why = "no workers have been placed yet" if running else "its launcher was killed before it could write it"
            reason = why if isinstance(error, FileNotFoundError) else error.strerror
            self.missing.append(f"report.json is not there ({reason}): what follows is from events.jsonl")
            self.report = told
            return
        except (ValueError, RecursionError) as error:
            self.missing.append(f"report.json is damaged ({error}): what follows is from events.jsonl")
            self.report = told
            return
        wrong: list[str] = []
        sound = _sound(data, REPORT, "", wrong)
        if wrong:
            self.missing.append(f"report.json is damaged: left out {', '.join(wrong[:5])}{' ...' if wrong[5:] else ''}")
        self.report = {**told, **{key: value for key, value in (sound or {}).items() if value is not None}}
        if "exit_code" not in self.report:
            heard = max((moments[-1].time for moments in self.series.values()), default=0.0)
            if "begin" in self.report:
                self.report["seconds"] = max(self.report.get("seconds", 0.0), heard - self.report["begin"])
            if not running:
                self.missing.append("its launcher was killed: this is what it last wrote, not how the job ended")

    def _read_series(self) -> None:
        for line in self._lines("progress.jsonl"):
            try:
                moment = Moment(*(float(line[name]) for name in Moment._fields))
                if not all(map(_is_sane, moment)):
                    raise ValueError(moment)
                self.series.setdefault(int(line["rank"]), []).append(moment)
            except (KeyError, TypeError, ValueError, OverflowError):
                self._damaged("progress.jsonl")

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        try:
            content = (self.folder / name).read_bytes()
        except OSError as error:
            self.missing.append(f"{name} cannot be read ({error.strerror})")
            return
        for line in content.splitlines():
            try:
                data = json.loads(line)
            except (ValueError, RecursionError):
                data = None
            if isinstance(data, dict):
                yield data
            else:
                self._damaged(name)

    def _damaged(self, name: str) -> None:
        text = f"{name} is damaged, or not all of it was written: lines that cannot be read are left out"
        if text not in self.missing:
            self.missing.append(text)


def verdict(report: Mapping[str, Any], running: bool) -> tuple[str, str]:
    """Return how the job ended, and whether this is good, bad or neutral."""
    if running:
        return "still runs", "neutral"
    code = report.get("exit_code")
    if code is None:
        return "end not known", "bad"
    if report.get("signal"):
        return f"ended by you ({signal_name(report['signal'])})", "neutral"
    return ("done", "good") if code == 0 else (f"failed, exit code {code}", "bad")


def _is_event(event: Mapping[str, Any]) -> bool:
    return isinstance(event.get("time"), NUMBER) and _is_sane(event["time"]) and isinstance(event.get("kind"), str)


def _is_sane(value: Any) -> bool:
    """Return whether the value is not a number, or is a number of reasonable size."""
    return not isinstance(value, NUMBER) or -LARGEST < value < LARGEST


def _sound(value: Any, shape: Any, where: str, wrong: list[str]) -> Any:
    """Return the value without parts that do not match the expected shape; the places of these parts are added to
    `wrong`."""
    if value is None:
        return None
    if isinstance(shape, dict) and isinstance(value, dict):
        return {key: _sound(value.get(key), part, f"{where}.{key}".strip("."), wrong) for key, part in shape.items()}
    if isinstance(shape, list) and isinstance(value, list):
        parts = [_sound(part, shape[0], f"{where}[{index}]", wrong) for index, part in enumerate(value)]
        return [part for part in parts if part is not None]
    is_plain = isinstance(shape, type | tuple) and isinstance(value, shape)
    if is_plain and not (isinstance(value, bool) and shape is not bool) and _is_sane(value):
        return value
    wrong.append(where or "all of it")
    return None


def _of_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Derive from the events a report like report.json, for a job that has no such file."""
    told: dict[str, Any] = {}
    ranks: dict[int, dict[str, Any]] = {}
    hosts: list[dict[str, Any]] = []
    lost = _lost(events)
    for event in events:
        kind, rank = event["kind"], event.get("rank")
        if kind == "start":
            told |= {"begin": event["time"], **{key: event.get(key) for key in ("job", "command", "dadt")}}
        elif kind == "agent ready":
            names = {"dadt": "version", "host": "host"}
            hosts.append({key: event.get(names.get(key, key)) for key in HOST})
        elif kind == "placed":
            told["config"] = {key: event[key] for key in ("algorithm", "executor") if key in event}
            ranks |= {each["rank"]: dict(each) for each in placed_in(event)}
        elif kind == "failed" and "failure" not in told and not event.get("secondary") and rank not in lost:
            told["failure"] = {key: event.get(key) for key in ("rank", "host", "type", "message", "step", "thread")}
        elif kind == "end":
            told |= {"end": event["time"], "exit_code": event.get("exit_code")}
        elif isinstance(rank, int) and rank in ranks:
            ranks[rank] |= _of_rank(event)
    told["ranks"], told["hosts"] = list(ranks.values()), hosts
    if "failure" not in told and (failure := _first_exit(events)):
        told["failure"] = failure
    if "begin" in told and "end" in told:
        told["seconds"] = told["end"] - told["begin"]
    sound = _sound(told, REPORT, "", [])
    return {key: value for key, value in sound.items() if value is not None}


def placed_in(event: Mapping[str, Any]) -> list[Any]:
    ranks = event.get("ranks")
    told = ranks if isinstance(ranks, list) else []
    return [each for each in told if isinstance(each, dict) and isinstance(each.get("rank"), int)]


def _of_rank(event: Mapping[str, Any]) -> dict[str, Any]:
    summary = event.get("summary")
    if event["kind"] == "summary" and isinstance(summary, dict):
        return {key: summary.get(key) for key in ("steps", "delayed", "wait_fraction", "samples")}
    if event["kind"] == "exit":
        found = {"exit_code": event.get("code"), "peak_memory": event.get("peak_memory")}
        steps = event.get("step")
        return {**found, "steps": max(0, steps)} if isinstance(steps, int) else found
    return {"pid": event["pid"]} if event["kind"] in ("started", "claim") and "pid" in event else {}


def _lost(events: list[dict[str, Any]]) -> list[Any]:
    """Return the ranks that were lost while the job continued with the remaining ranks."""
    told = [event.get("lost") for event in events if event["kind"] == "regroup"]
    return [rank for ranks in told if isinstance(ranks, list) for rank in ranks]


def _first_exit(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first exit with an error code of a rank that was neither stopped by the launcher nor lost while the
    job continued; None if there is none."""
    lost = _lost(events)
    for event in events:
        bad = event["kind"] == "exit" and event.get("code") and not event.get("stopped")
        if bad and event.get("rank") not in lost:
            return {**{key: event.get(key) for key in ("rank", "host", "step")}, "exit_code": event["code"]}
    return None
