"""Ranks end around calls that read state or wait for others: before them, within them, after them, on every rank."""

from __future__ import annotations

import random

import pytest
from harness.calls import CALLS, MOMENTS, SCRIPT
from harness.survivors import survivors

RANKS = 5
WITHIN = [("save", "within"), ("saved in the step", "within")]
EVERY = [*((call, moment) for call in CALLS for moment in MOMENTS if (call, moment) != ("end", "told")), *WITHIN]


def train_on(launch, faults: list[tuple[str, str, int]], *options: str) -> None:
    told = ",".join(f"{call}:{moment}:{rank}" for call, moment, rank in faults)
    settings = ["-np", str(RANKS), "--min-np", "1", "--warmup-steps", "4", *options]
    result = launch(SCRIPT, *settings, "train.py", told)
    assert result.code == 0, (told, result.err)
    ends = survivors(result)
    assert ends.keys() == set(range(RANKS)) - {rank for *_, rank in faults}, (told, result.err)
    assert len(set(ends.values())) == 1 or "local" in options, (told, ends)
    assert "saved after a failure" not in result.err, (told, result.err)


def test_the_others_train_on(launch) -> None:
    faults = [("state", "after", 2), ("save", "within", 4), ("in the step", "told", 0)]
    train_on(launch, faults, "--algorithm", "pipe", "--executor", "shm")


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("algorithm", "executor", "more"),
    [
        ("pipe", "shm", []),
        ("pipe", "gloo", ["--compression", "int8"]),
        ("pipe", "shm", ["--compression", "powersgd:2"]),
        ("sync", "gloo", ["--verify-every", "2"]),
        ("local", "shm", []),
    ],
)
@pytest.mark.parametrize("part", range(6))
def test_around_every_call(launch, algorithm: str, executor: str, more: list[str], part: int) -> None:
    """Each part draws its ranks, and has its share of all calls and moments: three in a job."""
    chance = random.Random(f"{algorithm} {executor} {more}")
    pairs = sorted(EVERY, key=lambda _: chance.random())[part::6]
    while pairs:
        mine = list({call: (call, moment) for call, moment in reversed(pairs)}.values())[:3]
        pairs = [pair for pair in pairs if pair not in mine]
        ranks = chance.sample(range(RANKS), len(mine))
        faults = [(*pair, rank) for pair, rank in zip(mine, ranks, strict=True)]
        train_on(launch, faults, "--algorithm", algorithm, "--executor", executor, *more)
