"""Lists the measurements: each uses the code of `dadt bench MODEL`, with all its contenders in turn in one run."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.convergence.study import cpu
from benchmarks.small_tensors import MILLISECOND, TENSORS
from dadt_cli.bench import plot
from dadt_cli.bench.figure import conditions
from dadt_cli.bench.party import Location
from dadt_cli.bench.peer import absent
from dadt_cli.bench.training import Contender, Measured, Task, alone, copies, limit, measure

LINK = ("--link", "1gbit")
LINK_BYTES = 1e9 / 8 * 1448 / 1514
"""Bytes of data per second. The speed of a link includes the headers of its packets."""
LOOK = 2.0
"""Seconds for which the machine's load is measured before a measurement begins."""
EVERY = 16
"""Number of steps between two averages of `local` in measurements of `auto`, and number of steps in each turn."""
PAIR, MANY = "plain ddp ddp-view pipe", "plain ddp ddp-view ddp-bf16 pipe pipe+bf16"
BYTES = "plain ddp-bf16 bare-bf16 pipe+bf16"
SHARED = "plain null ddp ddp-view pipe sync auto"
CHOICES = "auto sync pipe pipe+bf16 pipe+int8 local local+bf16 local+int8"
"""`auto`, and what a user could choose instead: a compressed `sync` is never faster than `pipe` with the same
compression."""
PLACES = {
    "10mbit": ("small", ("--link", "10mbit")),
    "100mbit": ("medium", ("--link", "100mbit")),
    "1gbit": ("medium", LINK),
    "10gbit": ("medium", ("--link", "10gbit")),
    "shm": ("medium", ()),
}
"""The places where `auto` is measured: the model of benchmarks/asleep.py, and how workers are connected. With large
weights, a step on the slowest link would take minutes."""


class Measurement(NamedTuple):
    name: str
    title: str
    task: Task
    contenders: str
    """Names of contenders: those of `dadt bench`, or an algorithm of DADT, with + and a compression."""
    options: tuple[str, ...] = LINK
    ranks: int = 2
    steps: int = 2
    rounds: int = 5
    every: int = 0
    """Number of steps between two averages of `local` and `auto`; 0: the default."""


GBIT, SHM, FREE = "on two hosts, 1 Gbit/s", "on one host, shared memory", "A free processor: the exchange takes"
ALL = [
    Measurement("resnet50", f"ResNet50 {GBIT}", Task("resnet50", 3), "plain ddp ddp-view bare horovod pipe sync"),
    Measurement("resnet50-compressed", f"ResNet50 {GBIT}, in fewer bytes", Task("resnet50", 3), BYTES),
    Measurement("resnet101", f"ResNet101 {GBIT}", Task("resnet101", 3), "plain ddp ddp-view bare horovod pipe"),
    Measurement("resnet101-compressed", f"ResNet101 {GBIT}, in fewer bytes", Task("resnet101", 3), BYTES),
    Measurement("asleep-even", f"{FREE} as long as a step computes", Task("benchmarks.asleep:even", 1), PAIR),
    Measurement("asleep-half", f"{FREE} half as long as a step computes", Task("benchmarks.asleep:half", 1), PAIR),
    Measurement(
        "asleep-accumulate",
        f"{FREE} as long as the 4 backwards of a step",
        Task("benchmarks.asleep:fourfold", 1, accumulate=4),
        PAIR,
    ),
    Measurement("shm-resnet50", f"ResNet50 {SHM}", Task("resnet50", 3), PAIR, ()),
    Measurement(
        "shm-perceptron",
        f"A perceptron of 25 million weights {SHM}",
        *(Task("benchmarks.perceptron:wide", 8), SHARED, ()),
        steps=5,
        rounds=10,
    ),
    Measurement("shm-mlp", f"A small perceptron {SHM}", Task("mlp", 8), SHARED, (), steps=20, rounds=20),
    Measurement("hosts-4x1", "ResNet18 on 4 hosts of one worker, 1 Gbit/s", Task("resnet18", 3), MANY, ranks=4),
    Measurement(
        "hosts-2x2",
        "ResNet18 on 2 hosts of two workers, 1 Gbit/s",
        *(Task("resnet18", 3), MANY, (*LINK, "--simulate-hosts", "2")),
        ranks=4,
    ),
    *(
        Measurement(
            f"auto-{place}",
            f"What auto chooses: {place}",
            Task(f"benchmarks.asleep:{model}"),
            CHOICES,
            options,
            steps=EVERY,
            rounds=3,
            every=EVERY,
        )
        for place, (model, options) in PLACES.items()
    ),
    *(
        Measurement(
            f"tensors-{count}",
            f"Steps of {count:,} small tensors {SHM}",
            Task(f"benchmarks.small_tensors:tensors_{count}"),
            "ddp sync pipe alone",
            (),
            steps=max(3, 5_000 // count),
            rounds=20,
        )
        for count in TENSORS
    ),
    Measurement(
        "tensors-alone",
        "Steps of a millisecond, by one worker under dadt run -np 1 and by python",
        *(Task(f"benchmarks.small_tensors:tensors_{MILLISECOND}"), "alone pipe", (), 1, 100, 200),
    ),
]
MEASUREMENTS = {each.name: each for each in ALL}
USUAL = [each.name for each in ALL if not each.name.startswith(("auto-", "tensors-"))]
"""Measurements that are made if none is named."""


def contender(name: str, ranks: int, *options: str) -> Contender:
    """Return the contender of this name. options: further ones of `dadt run`, for DADT's own contenders."""
    if name in ("alone", "plain"):
        return alone() if name == "alone" else copies(ranks)
    if name == "null":
        return limit(("--algorithm", "pipe"), ranks)
    algorithm, _, compression = name.partition("+")
    if algorithm not in ("auto", "local", "pipe", "sync"):
        return Contender(name, ranks, peer=name)
    compression = compression or ("auto" if algorithm == "auto" else "")
    return Contender(
        name, ranks, ("--algorithm", algorithm, *(("--compression", compression) if compression else ()), *options)
    )


def found(asked: Measurement, rounds: int, picture: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Make a measurement, and return its figures and conditions for a line of JSON. Raises DadtError if it cannot be
    made."""
    missing = {name: why for name in asked.contenders.split() if (why := absent(name))}
    names = [name for name in asked.contenders.split() if name not in missing]
    before = {**conditions(), "cpu": cpu(), "busy": psutil.cpu_percent(LOOK)}
    begun = time.monotonic()
    every = ("--sync-every", str(asked.every)) if asked.every else ()
    with tempfile.TemporaryDirectory() as logs:
        contenders = [
            contender(name, asked.ranks, *every, *(("--log-dir", logs) if name == "auto" else ())) for name in names
        ]
        location = Location(asked.options)
        measured = measure(contenders, asked.task, location, steps=asked.steps, rounds=rounds, progress=tell)
        choice = _choice(Path(logs)) if "auto" in names else ""
    plot.save(plot.training(measured.rows, measured.hello.unit, asked.title), str(picture), {}, [])
    each = zip(names, contenders, measured.rows, measured.turns, measured.cpu, strict=True)
    return {
        "title": asked.title,
        "conditions": before,
        "minutes": (time.monotonic() - begun) / 60,
        "notes": list(missing.values()),
        "rounds": rounds,
        "steps": asked.steps,
        "options": asked.options,
        "ranks": asked.ranks,
        **_model(asked.task, measured, asked),
        **({"choice": choice} if choice else {}),
        "contenders": {
            name: {"options": c.options, "seconds": seconds, "cpu": processor, "memory": row.memory}
            for name, c, row, seconds, processor in each
        },
    }


def _choice(logs: Path) -> str:
    """Return the last line in the job's journal in which `auto` reports its choice."""
    (journal,) = logs.glob("*/events.jsonl")
    return str(re.findall(r'"((?:warm-up done|after) [^"]* chooses [^"]*)"', journal.read_text())[-1])


def _model(task: Task, measured: Measured, asked: Measurement) -> dict[str, Any]:
    hello = measured.hello
    return {
        "model": task.model,
        "source": hello.source,
        "parameters": hello.parameters,
        "batch": task.batch_size,
        "accumulate": task.accumulate,
        "threads": hello.threads,
        "exchange": exchange(4 * hello.parameters, asked.ranks, asked.options),
    }


def exchange(size: int, ranks: int, options: Sequence[str]) -> float:
    """Return the least seconds in which hosts of one worker each can average `size` bytes over their links; 0 without
    links."""
    return 2 * (ranks - 1) / ranks * size / LINK_BYTES if tuple(options) == LINK else 0.0
