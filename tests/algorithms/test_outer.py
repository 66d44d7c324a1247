"""Parts of a model between two averages: over an executor that gives a rank its own values as the mean."""

from __future__ import annotations

import pytest
import torch
from harness.patience import PATIENCE

from dadt import _core
from dadt.algorithms.local.outer import Fragment, Outer, parts


@pytest.fixture
def engine():
    engine = _core.Engine(_core.NullExecutor(0, 2), 0, 2, 10.0)
    yield engine
    engine.close(5.0)


def fragment(engine, parameters, outer: Outer, compression: str = "none") -> Fragment:
    return Fragment("a test", parameters, outer, Peers(engine), ends, 64, compression)


def ends(error: Exception) -> None:
    """With any rank."""
    raise error


class Peers:
    device = background = None

    def __init__(self, engine) -> None:
        self.engine = engine

    def wait(self, work) -> None:
        work.wait(PATIENCE)


def step(parameters) -> None:
    for i, p in enumerate(parameters):
        p.data.add_(0.25 * (i + 1))


def test_parts_are_of_about_equal_bytes_and_in_order() -> None:
    parameters = [torch.zeros(n) for n in (10, 10, 1, 19, 40)]
    found = parts(parameters, 2)
    assert [[len(p) for p in part] for part in found] == [[10, 10, 1, 19], [40]]
    assert [[len(p) for p in part] for part in parts(parameters, 4)] == [[10, 10], [1, 19], [], [40]]
    assert [id(p) for part in parts(parameters, 7) for p in part] == [id(p) for p in parameters]
    assert parts([], 2) == [[], []]


def test_with_its_own_values_as_the_mean_a_rank_is_not_moved_by_a_merge(engine) -> None:
    parameters = [torch.rand(5, 3), torch.rand(40)]
    one = fragment(engine, parameters, Outer(0.7, 0.9))
    for _ in range(3):
        step(parameters)
        one.send(0)
        step(parameters)
        before = [p.clone() for p in parameters]
        one.receive()
        one.merge()
        for p, b in zip(parameters, before):
            assert torch.allclose(p, b, rtol=0, atol=1e-6)


def test_what_is_resumed_is_what_a_merge_would_have_made(engine) -> None:
    parameters = [torch.rand(5, 3), torch.rand(40)]
    one = fragment(engine, parameters, Outer(0.7, 0.9))
    step(parameters)
    one.send(0)
    resumed = {id(row.parameter): (a.clone(), v.clone()) for row, a, v in one.resumed()}
    one.receive()
    one.merge()
    assert len(resumed) == 2
    for key, row in one.rows.items():
        assert torch.equal(row.anchor, resumed[key][0])
        assert torch.equal(row.velocity, resumed[key][1])
    for row, anchor, velocity in one.resumed():
        assert torch.equal(row.anchor, anchor) and torch.equal(row.velocity, velocity)


def test_what_low_rank_loses_of_a_rounds_progress_comes_later(engine) -> None:
    torch.manual_seed(0)
    weight, bias = torch.zeros(12, 30), torch.zeros(12)
    one = fragment(engine, [weight, bias], Outer(1.0, 0.0), "powersgd:2")
    progress, rounds = torch.randn(12, 30), 40
    for _ in range(rounds):
        weight += progress
        bias += 1.0
        one.send(0)
        one.receive()
        assert not one.sent.settles
        one.merge()
    anchor = one.rows[id(weight)].anchor
    assert torch.equal(weight, anchor) and torch.equal(bias, torch.full((12,), float(rounds)))
    lost = (anchor / rounds - progress).norm() / progress.norm()
    assert 0 < lost < 0.3, "of one round alone it loses more than half"


def test_anchors_of_16_bit_weights_have_32(engine) -> None:
    weight = torch.ones(4, dtype=torch.bfloat16)
    one = fragment(engine, [weight], Outer(0.5, 0.0))
    weight.copy_(torch.full((4,), 1 + 2**-7))
    one.send(0)
    one.receive()
    one.merge()
    assert torch.equal(one.rows[id(weight)].anchor, torch.full((4,), 1 + 2**-8))


def test_settling_begins_anew(engine) -> None:
    weight = torch.zeros(4)
    one = fragment(engine, [weight], Outer(1.0, 0.9))
    weight.add_(1)
    one.send(0)
    one.settle(0)
    assert torch.equal(one.rows[id(weight)].velocity, torch.ones(4))  # what was in flight counts
    assert not one.under_way
    weight.add_(1)
    one.send(0)
    weight.fill_(5)
    one.replaced = True
    one.settle(0)
    assert torch.equal(weight, torch.full((4,), 5.0))
    assert torch.equal(one.rows[id(weight)].anchor, weight)
    assert torch.equal(one.rows[id(weight)].velocity, torch.zeros(4))
    assert not one.replaced


@pytest.mark.parametrize("outer", [Outer(1.0, 0.0), Outer(0.5, 0.0)], ids=["all of it", "half of it"])
@pytest.mark.parametrize("under_way", [False, True])
def test_what_compression_has_lost_is_there_once_ranks_have_settled(engine, outer, under_way) -> None:
    torch.manual_seed(0)
    weight, table = torch.zeros(12, 30), torch.zeros(16, 6, 3, 3).to(memory_format=torch.channels_last)
    one = fragment(engine, [weight, table], outer, "powersgd:2")
    progress = torch.randn(12, 30), torch.randn(16, 6, 3, 3)
    for last in (False, False, False, False, True):
        weight += progress[0]
        table += progress[1]
        one.send(0)
        if not (last and under_way):
            one.receive()
            one.merge()
    assert under_way or not torch.allclose(weight, 5 * outer.lr * progress[0], rtol=0, atol=1e-4)
    one.settle(0)
    torch.testing.assert_close(weight, 5 * outer.lr * progress[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(table, 5 * outer.lr * progress[1], rtol=0, atol=1e-5)


def test_what_was_replaced_owes_nothing(engine) -> None:
    weight = torch.zeros(12, 30)
    one = fragment(engine, [weight], Outer(1.0, 0.0), "powersgd:2")
    weight += torch.randn(12, 30)
    one.send(0)
    weight.fill_(5.0)
    one.replaced = True
    one.settle(0)
    assert torch.equal(weight, torch.full((12, 30), 5.0))
