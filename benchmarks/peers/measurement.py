"""What is measured: each by the code of `dadt bench MODEL`, all of its contenders in turn in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.convergence.study import cpu
from dadt_cli.bench import plot
from dadt_cli.bench.figure import conditions
from dadt_cli.bench.party import Here
from dadt_cli.bench.peer import absent
from dadt_cli.bench.training import Contender, Measured, Task, copies, limit, measure

OURS = {
    "pipe": ("--algorithm", "pipe"),
    "pipe+bf16": ("--algorithm", "pipe", "--compression", "bf16"),
    "sync": ("--algorithm", "sync"),
    "auto": ("--algorithm", "auto", "--compression", "auto"),
}
LINK = ("--link", "1gbit")
LINK_BYTES = 1e9 / 8 * 1448 / 1514
"""Bytes of data a second: the speed of a link includes the headers of its packets."""
LOOK = 2.0
"""Seconds in which the machine is looked at before anything starts."""


class Measurement(NamedTuple):
    name: str
    title: str
    task: Task
    contenders: str
    """Names of contenders: the fixed ones of `dadt bench`, or those of OURS."""
    options: tuple[str, ...] = LINK
    ranks: int = 2
    steps: int = 2
    rounds: int = 5


LARGE = "plain ddp ddp-view ddp-bf16 pipe pipe+bf16"
"""What is compared between more hosts or workers."""

MEASUREMENTS = {
    each.name: each
    for each in (
        Measurement(
            "resnet50",
            "ResNet50 on two hosts, 1 Gbit/s",
            Task("resnet50", 3),
            "plain ddp ddp-view bare horovod pipe sync",
        ),
        Measurement(
            "resnet50-compressed",
            "ResNet50 on two hosts, 1 Gbit/s, in fewer bytes",
            Task("resnet50", 3),
            "plain ddp-bf16 bare-bf16 pipe+bf16",
        ),
        Measurement(
            "resnet101",
            "ResNet101 on two hosts, 1 Gbit/s",
            Task("resnet101", 3),
            "plain ddp ddp-view bare horovod pipe",
        ),
        Measurement(
            "resnet101-compressed",
            "ResNet101 on two hosts, 1 Gbit/s, in fewer bytes",
            Task("resnet101", 3),
            "plain ddp-bf16 bare-bf16 pipe+bf16",
        ),
        Measurement(
            "asleep-even",
            "A free processor: the exchange takes as long as a step computes",
            Task("benchmarks.asleep:even", 1),
            "plain ddp ddp-view pipe",
        ),
        Measurement(
            "asleep-half",
            "A free processor: the exchange takes half as long as a step computes",
            Task("benchmarks.asleep:half", 1),
            "plain ddp ddp-view pipe",
        ),
        Measurement(
            "asleep-accumulate",
            "A free processor: the exchange takes as long as the 4 backwards of a step",
            Task("benchmarks.asleep:fourfold", 1, accumulate=4),
            "plain ddp ddp-view pipe",
        ),
        Measurement(
            "shm-resnet50",
            "ResNet50 on one host, shared memory",
            Task("resnet50", 3),
            "plain ddp ddp-view pipe",
            options=(),
        ),
        Measurement(
            "shm-perceptron",
            "A perceptron of 25 million weights on one host, shared memory",
            Task("benchmarks.perceptron:wide", 8),
            "plain null ddp ddp-view pipe sync auto",
            options=(),
            steps=5,
            rounds=10,
        ),
        Measurement(
            "shm-mlp",
            "A small perceptron on one host, shared memory",
            Task("mlp", 8),
            "plain null ddp ddp-view pipe sync auto",
            options=(),
            steps=20,
            rounds=20,
        ),
        Measurement("hosts-4x1", "ResNet18 on 4 hosts of one worker, 1 Gbit/s", Task("resnet18", 3), LARGE, ranks=4),
        Measurement(
            "hosts-2x2",
            "ResNet18 on 2 hosts of two workers, 1 Gbit/s",
            Task("resnet18", 3),
            LARGE,
            options=(*LINK, "--simulate-hosts", "2"),
            ranks=4,
        ),
    )
}


def contender(name: str, ranks: int) -> Contender:
    if name == "plain":
        return copies(ranks)
    if name == "null":
        return limit(OURS["pipe"], ranks)
    if name in OURS:
        return Contender(name, ranks, OURS[name])
    return Contender(name, ranks, peer=name)


def found(asked: Measurement, rounds: int, picture: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Figures and conditions of a measurement, for a line of JSON. Raises DadtError where it cannot be made."""
    names = asked.contenders.split()
    missing = {name: why for name in names if (why := absent(name))}
    contenders = [contender(name, asked.ranks) for name in names if name not in missing]
    before = {**conditions(), "cpu": cpu(), "busy": psutil.cpu_percent(LOOK)}
    begun = time.monotonic()
    place = Here(asked.options)
    measured = measure(contenders, asked.task, place, steps=asked.steps, rounds=rounds, progress=tell)
    plot.save(plot.training(measured.rows, measured.hello.unit, asked.title), str(picture), {}, [])
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
        "contenders": {
            c.name.partition(" ")[0]: {"options": c.options, "seconds": turns, "memory": row.memory}
            for c, row, turns in zip(contenders, measured.rows, measured.turns, strict=True)
        },
    }


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
    """The least seconds in which hosts of one worker each can average `size` bytes over their links; 0 without
    links."""
    return 2 * (ranks - 1) / ranks * size / LINK_BYTES if tuple(options) == LINK else 0.0
