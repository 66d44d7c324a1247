"""A compression that takes the place of another sends what the other one still owes."""

from __future__ import annotations

import pytest
import torch
from harness.ranks import printed
from harness.switching_rank import main

from dadt.comm.bucket import Bucket
from dadt.comm.compression import INT4, OF_MOMENTUM, Feedback, Unsent, carried, forms
from dadt.train.exchange.bucket_plan import BucketPlan


@pytest.mark.parametrize(("executor", "size"), [("shm", 2), ("shm", 3), ("tcp", 3)])
def test_what_came_is_what_was_sent(executor, size, tmp_path):
    ranks = printed(tmp_path, main, *((executor, rank, size, str(tmp_path)) for rank in range(size)))
    said = [rank.said for rank in ranks]
    assert len(set(said)) == 1, said
    owing, paid, after, _ = said[0].split()
    assert float(owing) > 0.05, "nothing was owed"
    assert float(paid) < 1e-5 and float(after) < 1e-5, said


def owing(name: str) -> tuple[Bucket, Feedback]:
    bucket = Bucket([torch.zeros(6, 4), torch.zeros(5)])
    (form,) = forms(name, [bucket])
    form.owed(29).copy_(torch.arange(29.0))
    return bucket, form


def test_what_is_owed_is_sent_once_and_with_gradients_alone():
    """That of a tensor without a gradient waits for its next one."""
    bucket, form = owing("int4")
    (rest,) = carried([form], forms("none", [bucket]))
    again = Unsent()
    again.restore(rest.observe())
    for each in (rest, again):
        sent = each.added(bucket, [torch.ones(6, 4), None], None)
        assert torch.equal(sent[0], torch.arange(24.0).view(6, 4) + 1) and sent[1] is None
        one, other = torch.ones(6, 4), torch.ones(5)
        first, second = each.added(bucket, [one, other], None)
        assert torch.equal(first, one) and torch.equal(second, torch.arange(24.0, 29.0) + 1)
        assert each.added(bucket, [None, other], None)[1] is other
    (rest,) = carried([form], forms("none", [bucket]))
    rest.forget()
    assert not rest.added(bucket, [torch.zeros(6, 4), None], None)[0].any()


def test_what_other_values_owe_is_dropped():
    bucket, form = owing("int8")
    other = forms("powersgd:1", [bucket])
    assert carried([form], other) == other
    assert carried(other, [None]) == [None]


def test_what_is_owed_of_momentum_is_not_sent_with_gradients():
    """Nor the other way round. In four bits, too."""
    parameters = [torch.zeros(6, 4), torch.zeros(5)]
    plan = BucketPlan(parameters, [], 1 << 20, compression="momentum:1", finely={parameters[1]})
    assert [bucket.layout.total for bucket in plan.buckets] == [5, 24]
    for momentum in (True, False):
        for form, total in zip(plan.forms, (5, 24), strict=True):
            form.owed(total).fill_(1.0)
        plan.compress("momentum:1", momentum=momentum)
        assert [form.codec for form in plan.forms] == [INT4, OF_MOMENTUM["momentum:1"] if momentum else INT4]
        assert not any(form.owed(total).any() for form, total in zip(plan.forms, (5, 24), strict=True))
