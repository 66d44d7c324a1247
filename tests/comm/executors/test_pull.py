"""Where an allreduce of a Python executor reduces: in the buffer of its outputs, unless inputs lie there."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from harness.patience import PATIENCE

from dadt import _core
from dadt.comm.bucket import Bucket
from dadt.comm.executors.pull import Puller
from dadt.errors import CommError

LANE = b"lane"


class Same:
    """One rank, whose sum is its own."""

    name = "same"

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.addresses: list[int] = []

    def allreduce(self, flat: torch.Tensor, reduction: str) -> None:
        self.addresses.append(flat.data_ptr())
        if self.fails:
            flat.fill_(float("nan"))
            raise RuntimeError("the wire broke")


def bucket() -> Bucket:
    return Bucket([torch.zeros(shape, device="cpu") for shape in ((500, 600), (7,), (3, 3))])


def averaged(executor: Any, made: Bucket, inputs: list[torch.Tensor]) -> None:
    engine = _core.Engine(None, 0, 1, 30.0)
    thread = threading.Thread(target=Puller(engine, executor, 0, 1).run)
    thread.start()
    try:
        pointers = [t.data_ptr() for t in inputs]
        room = {"flat": made.flats[0].data_ptr(), "room": made.room(0)}
        engine.allreduce(made.layout, pointers, made.pointers[0], "mean", 1.0, LANE, **room).wait(PATIENCE)
    finally:
        engine.close(30.0)
        thread.join()


def test_the_outputs_buffer_is_reduced_in_place() -> None:
    made, executor = bucket(), Same()
    inputs = [torch.randn_like(t) for t in made.tensors]
    views = made.views[0]
    averaged(executor, made, inputs)
    assert executor.addresses == [made.flats[0].data_ptr()]
    assert all(torch.equal(v, t) for v, t in zip(views, inputs, strict=True))
    assert float(made.flats[0].abs().sum()) == pytest.approx(sum(float(t.abs().sum()) for t in inputs))


@pytest.mark.parametrize("fails", [False, True])
def test_inputs_outlast_a_failure(fails: bool) -> None:
    made, executor = bucket(), Same(fails)
    inputs = made.views[0]
    for t in inputs:
        t.normal_()
    before = [t.clone() for t in inputs]
    if fails:
        with pytest.raises(CommError, match="the wire broke"):
            averaged(executor, made, inputs)
    else:
        averaged(executor, made, inputs)
    assert executor.addresses != [made.flats[0].data_ptr()]
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def test_a_turn_takes_other_memory() -> None:
    made = bucket()
    first, second = made.views[0], [v.data_ptr() for v in made.views[1]]
    made.renew(1)
    assert made.views[0] is first
    assert made.pointers[1] == [v.data_ptr() for v in made.views[1]] != second
    assert made.flats[1].data_ptr() == made.pointers[1][0]
    assert made.room(1) == made.room(0)
