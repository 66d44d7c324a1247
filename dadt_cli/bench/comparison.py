"""Measures groups of contenders that train in turn, and puts the results into tables."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dadt_cli.bench.conclusion import conclusion, legend, reference
from dadt_cli.bench.figure import BenchResults, ResultTable, conditions, progress
from dadt_cli.bench.ratio import cell
from dadt_cli.terminal.table import short

if TYPE_CHECKING:
    from dadt_cli.bench.party import Location
    from dadt_cli.bench.sweep import ContenderGroup
    from dadt_cli.bench.training import Measured, Task, TrainingRow

ROUNDS = 10
SECONDS = 300.0
"""Longest duration of a training benchmark without --rounds, in seconds, unless the minimum of 6 rounds takes longer.
"""


def measure_in_turn(
    wanted: Sequence[ContenderGroup], tasks: Sequence[Task], location: Location, steps: int, rounds: int | None
) -> list[Measured]:
    from dadt_cli.bench.training import measure

    seconds = SECONDS / len(wanted) if rounds is None else math.inf
    rounds = ROUNDS if rounds is None else rounds
    made = []
    with progress(sum(2 * len(group.contenders) + rounds for group in wanted)) as tell:
        for group, task in zip(wanted, tasks, strict=True):
            say = _prefixed(tell, f"{size_of(group)}: " if len(wanted) > 1 else "")
            made.append(
                measure(group.contenders, task, location, steps=steps, rounds=rounds, seconds=seconds, progress=say)
            )
    return made


def _prefixed(tell: Callable[[str], None], prefix: str) -> Callable[[str], None]:
    return lambda what: tell(prefix + what)


def size_of(group: ContenderGroup) -> str:
    return f"{group.ranks} worker{'s' if group.ranks > 1 else ''}, batch {group.batch_size} each"


def results_of(
    wanted: Sequence[ContenderGroup],
    tasks: Sequence[Task],
    measured: Sequence[Measured],
    notes: Sequence[str],
    rounds: int,
    network: str,
) -> BenchResults:
    hello, task = measured[0].hello, tasks[0]
    rows = [row for each in measured for row in each.rows]
    how = ("" if task.optimizer == "sgd" else f"{task.optimizer}, ") + task.precision
    how += f", {task.accumulate} backwards per step" if task.accumulate > 1 else ""
    done = sorted({len(each.turns[0]) for each in measured})
    title = f"{task.model}: {hello.parameters:,} parameters, {how}, {hello.device}{network}, {done[0]} rounds"
    told = [text for each in measured if (text := conclusion(each.rows))]
    told.append(legend(reference(measured[0].rows).name, hello.unit))
    if done[0] < rounds:
        told.append(f"{done[0]} of {rounds} rounds fit in {SECONDS / 60:g} minutes; --rounds {rounds} makes all")
    told += [f"{task.model}: {hello.source or 'its factory'}; {'made-up data' if not task.data else task.data}"]
    cores = conditions()["cores"]
    threads = f"{hello.threads} thread" + ("s" if hello.threads > 1 else "")
    told.append(f"{threads} for each worker; this host has {cores} cores, and its load was {os.getloadavg()[0]:.1f}")
    about = {
        "model": {
            "name": task.model,
            "parameters": hello.parameters,
            "source": hello.source,
            "unit": hello.unit,
            "device": hello.device,
            "precision": task.precision,
            "accumulate": task.accumulate,
            "optimizer": task.optimizer,
            "data": task.data,
            "threads": hello.threads,
        },
        "seconds of a step, by round": [each.turns for each in measured],
        "processor seconds of a step, by round": [each.cpu for each in measured],
        "processor seconds of transport in a step, by round": [each.transport for each in measured],
    }

    def picture() -> Any:
        from dadt_cli.bench import plot

        where = f", {wanted[0].ranks} workers" if len(wanted) == 1 else ""
        batch = {group.batch_size for group in wanted}
        where += f", batch {batch.pop()} each" if len(batch) == 1 else ""
        return plot.training(rows, hello.unit, f"{task.model}{where}, {hello.device}, {how}{network}")

    tables = []
    for group, each in zip(wanted, measured, strict=True):
        tables.append(_training_table(f"{title}, {size_of(group)}", each.rows, hello.unit))
        if moving := [row for row in each.rows if row.beyond is not None or row.transport is not None]:
            tables.append(_processor_table(moving))
    return BenchResults(rows, tables, [*notes, *told], about, picture)


def _training_table(title: str, rows: Sequence[TrainingRow], unit: str) -> ResultTable:
    first = reference(rows)
    columns: dict[str, Callable[[TrainingRow], str]] = {
        "": lambda row: row.name,
        f"{unit}/s": lambda row: cell(row.rate),
        "per rank": lambda row: _range([each.median for each in row.rates]),
        "scaling\n%": lambda row: cell(row.efficiency, 100.0),
        "exposed\n%": lambda row: cell(row.exposed, 100.0),
        f"/ {first.name}": lambda row: "1" if row is first else cell(row.speed),
        "MB": lambda row: short(row.memory / 1e6),
    }
    return ResultTable.of(title, rows, columns)


def _processor_table(rows: Sequence[TrainingRow]) -> ResultTable:
    columns: dict[str, Callable[[TrainingRow], str]] = {
        "": lambda row: row.name,
        "beyond plain\nms": lambda row: cell(row.beyond, 1e3),
        "transport\nms": lambda row: cell(row.transport, 1e3),
    }
    return ResultTable.of("processor time of a step, on the rank that needs the most", rows, columns)


def _range(values: Sequence[float]) -> str:
    low, high = short(min(values)), short(max(values))
    return low if low == high else f"{low}–{high}"
