"""`dadt bench`: what communication and steps cost on this machine, as a table or JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dadt.errors import ConfigError

if TYPE_CHECKING:
    from dadt.benchmarks.ratio import Interval
    from dadt.benchmarks.step import Result

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

json_option = click.option("--json", "file", metavar="FILE", help="Write the figures as JSON, too; - for stdout.")
np_option = click.option("-np", "--np", "ranks", default=2, show_default=True, help="Worker processes.")


@click.group()
def bench() -> None:
    """Measure communication and steps on this machine: contenders in turn, medians, ratios with intervals."""


@bench.command()
@np_option
@click.option("--sizes", default="64K,1M,100M", show_default=True, help="Bytes of float32, with K, M or G.")
@click.option("--rounds", default=50, show_default=True, help="Times that each contender runs.")
@json_option
def allreduce(ranks: int, sizes: str, rounds: int, file: str | None) -> None:
    """dadt's shared memory against torch's Gloo and a memcpy, packing and delivering 60 tensors included."""
    from dadt.benchmarks.allreduce import measure

    rows = measure(ranks=ranks, sizes=[parse_size(size) for size in sizes.split(",")], rounds=rounds)
    head = ["bytes", "dadt ms", "gloo ms", "memcpy ms", "gloo / dadt", "dadt / memcpy", "wrong"]
    lines = [
        [
            f"{row.bytes:,}",
            milliseconds(row.dadt),
            milliseconds(row.gloo),
            milliseconds(row.memcpy),
            str(row.gloo_per_dadt),
            str(row.dadt_per_memcpy),
            str(row.wrong),
        ]
        for row in rows
    ]
    report(f"allreduce, {ranks} workers, {rounds} rounds", head, lines, rows, file)


@bench.command()
@np_option
@click.option("--model", type=click.Choice(["resnet18", "resnet50", "mlp"]), default="resnet18", show_default=True)
@click.option("--batch-size", default=4, show_default=True, help="Samples of each worker's step.")
@click.option("--steps", default=2, show_default=True, help="Steps of each contender in a round.")
@click.option("--rounds", default=10, show_default=True, help="Rounds; contenders take turns.")
@json_option
def step(ranks: int, model: str, batch_size: int, steps: int, rounds: int, file: str | None) -> None:
    """A training step: with 1 worker against plain python, with more against the null executor."""
    from dadt.benchmarks.step import Way, measure

    if ranks == 1:
        ways = [Way("python", None), Way("dadt run -np 1", [])]
    else:
        ways = [
            Way("null", ["--executor", "null", "--warmup-steps", "2"]),
            Way("pipe", ["--warmup-steps", "2"]),
            Way("sync", ["--algorithm", "sync"]),
        ]
    results = measure(ways, ranks=ranks, model=model, batch_size=batch_size, steps=steps, rounds=rounds)
    report_results(f"step of {model}, batch {batch_size}, {ranks} workers", results, file)


@bench.command()
@np_option
@click.option("--width", default=2240, show_default=True, help="Of 5 layers, width x width each: 100 MB.")
@click.option("--batch-size", default=2, show_default=True, help="Samples of each worker's step.")
@click.option("--rounds", default=20, show_default=True, help="Rounds; contenders take turns.")
@json_option
def ddp(ranks: int, width: int, batch_size: int, rounds: int, file: str | None) -> None:
    """A step of DistributedDataParallel over backend dadt against torch's Gloo."""
    from dadt.benchmarks.ddp import measure

    row = measure(ranks=ranks, width=width, batch_size=batch_size, rounds=rounds)
    head = ["parameters", "dadt ms", "gloo ms", "alone ms", "gloo / dadt"]
    lines = [
        [f"{row.parameters:,}", *(milliseconds(v) for v in (row.dadt, row.gloo, row.alone)), str(row.gloo_per_dadt)]
    ]
    report(f"step of DDP, {ranks} workers, {rounds} rounds", head, lines, [row], file)


@bench.command()
@np_option
@click.option("--rounds", default=5, show_default=True, help="Starts of each contender.")
@json_option
def startup(ranks: int, rounds: int, file: str | None) -> None:
    """From the command to the first step: `dadt run` against torchrun."""
    from dadt.benchmarks.startup import measure

    report_results(f"start of {ranks} workers", measure(ranks=ranks, rounds=rounds), file)


def parse_size(text: str) -> int:
    """Bytes, from 1000, 64K, 1.5M or 1G.

    Raises ConfigError for anything else.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"--sizes {text}: give sizes as 64K,1M,100M")
    return int(float(match[1]) * UNITS[match[2].upper()])


def milliseconds(value: Interval) -> str:
    return f"{1e3 * value.median:.3f}"


def report_results(title: str, results: Sequence[Result], file: str | None) -> None:
    lines = [[r.name, milliseconds(r.seconds), str(r.ratio)] for r in results]
    head = ["", "ms", f"ratio to {results[0].name}"]
    if any(r.own for r in results):
        head.append("in dadt's hooks")
        lines = [[*line, f"{100 * (r.own or 0.0):.2f} %"] for line, r in zip(lines, results, strict=True)]
    report(title, head, lines, results, file)


def report(
    title: str, head: Sequence[str], lines: Sequence[Sequence[str]], rows: Sequence[Any], file: str | None
) -> None:
    """The table on stdout, unless the JSON goes there."""
    if file is not None:
        figures = {"title": title, "conditions": conditions(), "rows": [asdict(row) for row in rows]}
        text = json.dumps(figures, indent=2)
        if file == "-":
            click.echo(text)
            return
        try:
            Path(file).write_text(text + "\n")
        except OSError as error:
            raise ConfigError(f"--json {file}: cannot write it ({error.strerror})") from error
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption="medians; in brackets, the interval of 95 %")
    for name in head:
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*line)
    Console().print(table)


def conditions() -> dict[str, Any]:
    """What the figures depend on."""
    from dadt import _core

    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "dadt": _core.__version__,
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "simd": _core.simd,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }
