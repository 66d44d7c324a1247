"""Which batches a step's weight is of, for scripts that fetch and train in several rhythms."""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest

from dadt.train.batch_weight import BatchWeight, Pass


class Script:
    """One optimizer or two, and loaders whose batches are full as given."""

    def __init__(self, optimizers: int = 1) -> None:
        self.backwards = 0
        self.weights = [BatchWeight(lambda: self.backwards) for _ in range(optimizers)]
        self.used: list[float] = []

    def fetch(self, source: Pass, *fills: float) -> None:
        for fill in fills:
            for weight in self.weights:
                weight.drew(source, int(fill * 4), 4)

    def end(self, source: Pass) -> None:
        source.is_over = True
        for weight in self.weights:
            weight.pass_over(source)

    def step(self, backwards: int = 1, optimizer: int = 0) -> float:
        self.backwards += backwards
        weight = self.weights[optimizer]
        used = weight.value
        weight.exchanged()
        weight.stepped()
        return used


def test_one_batch_a_step() -> None:
    script, source = Script(), Pass("DataLoader #1")
    for fill in (1, 1, 0.5):
        script.fetch(source, fill)
        assert script.step() == fill
    script.end(source)
    assert script.step() == 1  # of a batch that it kept


@pytest.mark.parametrize("again", range(2))
def test_one_batch_ahead(again: int) -> None:
    """In passes down to one of two batches; the last step comes after the end."""
    script = Script()
    for fills in ([1, 1, 0.5, 0], [1, 0], [0.5]):
        source = Pass("DataLoader #1")
        script.fetch(source, fills[0])
        for before, fill in pairwise(fills):
            script.fetch(source, fill)
            assert script.step() == before
            if again:
                assert script.step() == before  # once more on the same batch
        script.end(source)
        assert script.step() == fills[-1]
        assert script.step() == 1


def test_two_batches_ahead() -> None:
    script, source = Script(), Pass("DataLoader #1")
    script.fetch(source, 1, 0.5, 0.25)
    assert script.step() == 1
    script.end(source)
    assert [script.step(), script.step(), script.step()] == [0.5, 0.25, 1]


def test_batches_ahead_that_add_up() -> None:
    script, source = Script(), Pass("DataLoader #1")
    script.fetch(source, 1, 1, 1)
    assert script.step(backwards=2) == 1
    script.fetch(source, 1, 0)
    assert script.step(backwards=2) == 1
    script.end(source)
    assert script.step() == 0


def test_batches_that_add_up() -> None:
    script, source = Script(), Pass("DataLoader #1")
    for fills in ([1, 1], [1, 0.5], [0.5]):
        script.fetch(source, *fills)
        assert script.step(backwards=len(fills)) == sum(fills) / len(fills)


def test_two_batches_in_one_forward() -> None:
    script, source = Script(), Pass("DataLoader #1")
    script.fetch(source, 1, 1)
    assert script.step() == 1
    script.fetch(source, 1, 1)
    assert script.step() == 1
    script.fetch(source, 0.5, 0)
    assert script.step() == 0.25


def test_two_loaders() -> None:
    script, sources = Script(), [Pass("DataLoader #1"), Pass("DataLoader #1")]
    for fills in ((1, 1), (0.5, 1), (0, 1)):
        for source, fill in zip(sources, fills, strict=True):
            script.fetch(source, fill)
        assert script.step() == sum(fills) / 2


def test_two_optimizers_of_a_script_that_fetches_ahead() -> None:
    script, source = Script(optimizers=2), Pass("DataLoader #1")
    fills = [1, 1, 0.5, 0]
    script.fetch(source, fills[0])
    for before, fill in pairwise(fills):
        script.fetch(source, fill)
        assert [script.step(optimizer=each) for each in range(2)] == [before] * 2
    script.end(source)
    assert [script.step(optimizer=each) for each in range(2)] == [0] * 2


def test_all_batches_before_the_first_step() -> None:
    """It is not known in which order they come: the first step has their mean, and then each counts in full."""
    script, source = Script(), Pass("DataLoader #1")
    script.fetch(source, 1, 1, 1, 1, 0.5)
    script.end(source)
    assert [script.step(), script.step()] == [0.9, 1]


def test_a_pass_that_the_script_has_left() -> None:
    script = Script()
    for _ in range(2):
        source = Pass("DataLoader #1")
        script.fetch(source, 1, 0.5)
        assert script.step() == 1


def test_a_pass_that_is_gone_with_its_first_batch() -> None:
    """As of next(iter(loader))."""
    script = Script()
    for fill in (1, 0.5, 0.25):
        script.fetch(Pass("DataLoader #1"), fill)
        gc.collect()
        assert script.step() == fill
    assert script.weights[0].drawn == 0
