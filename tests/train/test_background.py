"""What is computed between the two allreduces of PowerSGD, behind the training: when, and with what bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from harness.patience import PATIENCE
from torch import nn

from dadt import _core
from dadt.comm.executors.device import Averaging
from dadt.errors import Aborted
from dadt.train.exchange.background import Background
from dadt.train.exchange.bucket_plan import BucketPlan
from dadt.train.exchange.exchange import Exchange
from dadt.train.exchange.step_metadata import StepMetadata

STEPS = 6


@pytest.fixture
def engine() -> Iterator[_core.Engine]:
    engine = _core.Engine(_core.NullExecutor(0, 1), 0, 1, PATIENCE)
    yield engine
    engine.close(PATIENCE)


@pytest.fixture
def background(engine: _core.Engine) -> Iterator[Background]:
    background = Background(engine)
    yield background
    background.close()
    assert background._thread is None or not background._thread.is_alive()


class Steps:
    """Of a training whose gradients come one step late."""

    def __init__(self, engine: _core.Engine, background: Background | None) -> None:
        self.engine, self.device, self.background = engine, None, background
        self.members = range(1)
        self._random = torch.Generator().manual_seed(0)
        self._parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((24, 16), (16,), (8, 24))]
        self._schema = BucketPlan(self._parameters, [], 1600, turns=2, compression="powersgd:2")
        assert len(self._schema.buckets) == 2
        self._number = 0

    def wait(self, work: _core.Work | Averaging) -> None:
        wait(work)

    def launch(self) -> Exchange:
        for p in self._parameters:
            p.grad = torch.randn(p.shape, generator=self._random)
        exchange = Exchange(self, self._schema, self._number, f"step {self._number}", 1.0)
        exchange.close(StepMetadata(self._schema.crc, 0, 0, 0, 0, False, 1.0, 0.0))
        self._number += 1
        return exchange

    def averages(self, *, early: bool = False) -> list[torch.Tensor]:
        """Of all steps but the last: each is waited for when the next one has been launched.

        early: where nothing goes on in the background, as `pipe` does: the second half begins before the next step's
        first.
        """
        got = []
        before = self.launch()
        for _ in range(STEPS):
            if early:
                before.go_on()
            after = self.launch()
            before.receive()
            got += [average.clone() for _, average in before.averaged_gradients()]
            before = after
        before.wait()
        return got


def wait(work: _core.Work | Averaging) -> None:
    work.wait(PATIENCE)


def test_both_halves_go_on_while_nobody_waits(engine: _core.Engine, background: Background) -> None:
    first, second = (Steps(engine, background).launch() for _ in range(2))
    assert not first.halfway and len(first.works) == 4
    for exchange in (second, first):
        exchange.works[-1].wait(PATIENCE)
    assert first.done and second.done


def test_averages_have_the_same_bits_as_where_the_step_computes_them(
    engine: _core.Engine, background: Background
) -> None:
    behind, within = Steps(engine, background).averages(), Steps(engine, None).averages()
    early = Steps(engine, None).averages(early=True)
    assert len(behind) == 3 * STEPS
    for one, *others in zip(behind, within, early, strict=True):
        assert all(torch.equal(one, other) for other in others)
    # What one step loses comes later: a training without feedback would differ.
    assert not torch.equal(behind[0], Steps(engine, background).averages()[-3])


def test_it_computes_with_as_many_threads_as_the_training(engine: _core.Engine, background: Background) -> None:
    seen = []
    before = torch.get_num_threads()
    try:
        for threads in (3, 2):
            torch.set_num_threads(threads)
            background.begin(lambda wait: seen.append(torch.get_num_threads()))
    finally:
        torch.set_num_threads(before)
    background.close()
    assert seen == [3, 2]


def test_what_fails_there_ends_the_engine(engine: _core.Engine, background: Background) -> None:
    held = engine.allreduce(_core.Layout(_core.DType.float32, [0]), [0], [0], "held", held=True)
    background.begin(lambda wait: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(Aborted, match="computing between two allreduces failed: RuntimeError"):
        held.wait(PATIENCE)


def test_it_ends_with_the_engine(engine: _core.Engine, background: Background) -> None:
    held = engine.allreduce(_core.Layout(_core.DType.float32, [0]), [0], [0], "held", held=True)
    background.begin(lambda wait: wait(held))
    engine.abort("enough")
    with pytest.raises(Aborted, match="enough"):
        held.wait(PATIENCE)
