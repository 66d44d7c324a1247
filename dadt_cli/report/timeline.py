"""`dadt timeline`: summarizes a timeline in figures: where the ranks' time went, and for which ranks they waited."""

from __future__ import annotations

import heapq
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from dadt.control.timeline_file import HEAD, PART_HEAD
from dadt.errors import ConfigError
from dadt_cli.terminal.options import paths
from dadt_cli.terminal.table import Table, table

STAGES = ("negotiate", "queue", "pack", "wait", "exchange", "unpack")
LONGEST = 10
NOTABLE = 1.05
"""A rank is reported as slower than the others if it computes at least this many times as long."""


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, shell_complete=paths("file"))
def timeline(files: Sequence[str]) -> None:
    """Summarize a timeline recorded by `dadt run --timeline FILE`.

    If the job still runs or has failed, this reads its parts FILE.rank0, FILE.rank1 and so on.
    """
    summary = Summary()
    for file in files:
        path = Path(file)
        found = parts(path)
        if not found:
            raise ConfigError(f"{path}: there is no such file; give the FILE of dadt run --timeline FILE")
        if found != [path]:
            why = "as its job still runs or failed, or its ranks could not meet"
            click.echo(f"{path} is not there, {why}: reading its {len(found)} parts\n")
        read(found, summary)
    if summary.torn and not summary.ranks:
        raise ConfigError("; ".join(summary.torn))
    for line in summary.lines():
        click.echo(line)


def parts(path: Path) -> list[Path]:
    """Return the timeline file, or the files per rank that a job leaves while it runs or after a failure; empty if
    there are none."""
    if path.exists():
        return [path]
    found = {p.name.rpartition(".rank")[2]: p for p in path.parent.glob(f"{path.name}.rank*")}
    return [found[number] for number in sorted(filter(str.isdigit, found), key=int)]


def read(paths: Sequence[Path], summary: Summary) -> None:
    """Add all events of the files to the summary. Raises ConfigError for a file that is not a timeline."""
    for path in paths:
        for event in events(path, summary.torn):
            try:
                summary.add(event)
            except (KeyError, TypeError) as error:
                raise ConfigError(f"{path}: this is no event of dadt's: {json.dumps(event)}") from error


def events(path: Path, torn: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a file, reading line by line since the file may be large. torn: a list to which a sentence is
    added if the file is incomplete. Raises ConfigError if the file is not a timeline."""
    try:
        with path.open("rb") as file:
            head = file.readline()
            if not head or (head != HEAD and HEAD.startswith(head)):
                torn.append(f"{path} is torn: it ends before its first event")
                return
            if head not in (HEAD, PART_HEAD):
                raise ConfigError(f"{path}: this is no timeline of dadt; give the FILE of dadt run --timeline FILE")
            for number, line in enumerate(file, 2):
                if line.rstrip(b"\n") == b"]}":
                    return
                try:
                    yield json.loads(line.rstrip(b",\n"))
                except (ValueError, RecursionError) as error:
                    if line.endswith(b"\n"):
                        raise ConfigError(f"{path}, line {number}: this is no event ({error})") from error
                    why = ", as its rank was ended while it wrote, or still writes" if head == PART_HEAD else ""
                    torn.append(f"{path} is torn: it ends within line {number}{why}")
                    return
            if head == HEAD:  # one rank's file has no end mark, since the rank may still be writing to the file
                torn.append(f"{path} is torn: its end, and what events stood before that, are not there")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


@dataclass(slots=True)
class RankTimes:
    """Sums over one rank's steps in microseconds, without the first step, in which ranks connect and the script warms
    up."""

    host: str = ""
    steps: int = 0
    compute: float = 0.0
    waited: float = 0.0
    operations: int = 0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def per_step(self, sum: float) -> float:
        return sum / self.steps if self.steps else 0.0

    @property
    def share(self) -> float:
        return self.waited / (self.compute + self.waited) if self.waited else 0.0


class Summary:
    """A summary of all ranks' events; the order in which ranks are added does not matter."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankTimes] = {}
        self.longest: list[tuple[float, int, int, str, float]] = []
        """The longest waits, each as duration, rank, step, what the rank waited for, and time."""
        self.clock_error = 0.0
        self.torn: list[str] = []
        """A sentence for each file that ends too early."""
        self._begun: dict[str, float] = {}

    def add(self, event: dict[str, Any]) -> None:
        rank = self.ranks.setdefault(event["pid"], RankTimes())
        if event["ph"] == "M":
            self._describe(rank, event)
        elif event["ph"] == "C":
            return
        elif event["ph"] == "b":
            self._begun[event["id"]] = event["ts"]
        elif event["ph"] == "e":
            rank.stages[event["cat"]] += event["ts"] - self._begun.pop(event["id"], event["ts"])
        elif event["cat"] == "step" and event["args"]["step"] > 0:
            rank.steps += 1
            rank.compute += event["args"]["compute_us"]
            rank.waited += event["args"]["exposed_wait_us"]
        elif event["cat"] == "stage":
            rank.stages[event["name"]] += event["dur"]
        elif event["cat"] == "wait" and event["args"]["step"] > 0:
            args = event["args"]
            wait = (event["dur"], event["pid"], args["step"], args["for"], event["ts"])
            (heapq.heappush if len(self.longest) < LONGEST else heapq.heappushpop)(self.longest, wait)
        elif event["cat"] not in ("step", "compute", "wait", "gpu"):
            rank.operations += 1

    def _describe(self, rank: RankTimes, event: dict[str, Any]) -> None:
        if event["name"] == "process_name":
            rank.host = event["args"]["name"].partition("(")[2].rstrip(")")
        elif event["name"] == "dadt":
            self.clock_error = max(self.clock_error, event["args"].get("clock_error_us", 0.0))

    def lines(self) -> list[str]:
        parts = [[f"{each.title}:", *table(each.head, each.rows, each.left)] for each in self.tables()]
        return [line for part in [*parts, self.verdict()] if part for line in (*part, "")][:-1]

    def tables(self) -> list[Table]:
        return [each for each in (self._steps(), self._communication(), self._waits()) if each is not None]

    def _steps(self) -> Table | None:
        if not any(rank.steps for rank in self.ranks.values()):
            return None
        head = ["RANK", "HOST", "STEPS", "STEP", "COMPUTE", "EXPOSED WAIT", "SHARE"]
        rows = []
        for number, rank in sorted(self.ranks.items()):
            times = [rank.per_step(sum) for sum in (rank.compute + rank.waited, rank.compute, rank.waited)]
            rows.append([str(number), rank.host, str(rank.steps), *map(_time, times), f"{100 * rank.share:.1f} %"])
        return Table("time per step, without the first one", head, rows, ["HOST"])

    def _communication(self) -> Table:
        head = ["RANK", "OPERATIONS", *(stage.upper() for stage in STAGES)]
        rows = [
            [str(number), str(rank.operations), *(_time(rank.stages[stage]) for stage in STAGES)]
            for number, rank in sorted(self.ranks.items())
        ]
        return Table("communication in all, which compute may hide (wait: for the last rank to arrive)", head, rows)

    def _waits(self) -> Table | None:
        if not self.longest:
            return None
        rows = [
            [_time(time), str(rank), str(step), f"{at / 1e6:.3f} s", what]
            for time, rank, step, what, at in sorted(self.longest, reverse=True)
        ]
        head = ["WAIT", "RANK", "STEP", "AT", "FOR"]
        return Table("longest exposed waits, without the first step", head, rows, ["FOR"])

    def verdict(self) -> list[str]:
        lines = []
        moved = sum(r.stages["pack"] + r.stages["exchange"] + r.stages["unpack"] for r in self.ranks.values())
        waited = sum(r.waited for r in self.ranks.values())
        if moved:
            still = f", and stood still for {_time(waited)} in their steps" if waited else ""
            lines.append(f"all ranks together moved bytes for {_time(moved)}{still}")
        per_step = {number: rank.per_step(rank.compute) for number, rank in self.ranks.items() if rank.steps}
        if len(per_step) > 1:
            slowest = max(per_step, key=lambda number: per_step[number])
            others = statistics.median(time for number, time in per_step.items() if number != slowest)
            if per_step[slowest] >= NOTABLE * others:
                lines.append(
                    f"rank {slowest} is the slowest: it computes for {_time(per_step[slowest])} in a step, the others"
                    f" for {_time(others)}"
                )
            else:
                lines.append("no rank is much slower than the others")
        if self.clock_error:
            lines.append(f"the ranks' clocks are aligned to {_time(self.clock_error)}")
        return lines + self.torn


def _time(microseconds: float) -> str:
    if microseconds >= 1e6:
        return f"{microseconds / 1e6:.2f} s"
    return f"{microseconds / 1e3:.2f} ms" if microseconds >= 1e3 else f"{microseconds:.0f} us"
