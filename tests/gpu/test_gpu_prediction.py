"""A GPU's weights are predicted by one kernel, which the host does not wait for."""

from __future__ import annotations

import pytest
import torch
from harness.next_step import PAIRS, begun, foresees

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("way", "kind"), PAIRS)
def test_the_step_is_foreseen(way: str, kind: str) -> None:
    foresees(way, kind, "cuda")


@pytest.mark.parametrize("way", ["momentum", "adamw, fused"])
def test_what_is_no_number_moves_no_weight(way: str) -> None:
    w, optimizer, prediction = begun(way, "float32", "cuda")
    w.grad = torch.randn_like(w)
    own, average = torch.randn_like(w), torch.randn_like(w)
    own[2, 3] = torch.inf
    w.grad = own
    prediction.before_step(late=True, scale=None)
    w.grad = average
    optimizer.step()
    prediction.after_step(held=False, scale=None)
    before = w.detach().clone()
    prediction.apply()
    stays = w.detach() == before
    assert stays[2, 3] and stays.sum() == 1
    prediction.undo()
    assert torch.equal(w, before)


def test_one_launch_moves_all_parameters() -> None:
    torch.manual_seed(0)
    parameters = [torch.randn(7 + i, 1000, device="cuda", requires_grad=True) for i in range(40)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    from dadt.train.prediction.expectation import Expectation

    prediction = Expectation(optimizer, parameters, share=0.9)

    def step(number: int) -> None:
        for p in parameters:
            p.grad = torch.randn_like(p)
        prediction.before_step(late=number > 1, scale=None)
        optimizer.step()
        prediction.after_step(held=False, scale=None)

    for number in range(80):
        step(number)
        if number == 70:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                torch.cuda.set_sync_debug_mode("error")
                prediction.apply()
                torch.cuda.set_sync_debug_mode("default")
            kernels = [e.name for e in profiler.events() if e.device_type.name == "CUDA" and "Mem" not in e.name]
            assert "_foresee" in kernels and len(kernels) <= 6, kernels
        else:
            prediction.apply()


def test_a_graph_that_the_script_captures_reads_true_weights() -> None:
    """It goes on reading the memory that it was captured with, which predicted weights have for a while only."""
    w, _, prediction = begun("momentum", "float32", "cuda")
    before, graph = w.detach().clone(), torch.cuda.CUDAGraph()
    prediction.apply()
    assert not torch.equal(w, before)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        prediction.apply()  # as a forward does
        read = w.detach() * 2
    graph.replay()
    assert torch.equal(read, before * 2) and torch.equal(w, before)


def test_predicted_weights_are_no_copy() -> None:
    w, _, prediction = begun("adamw, fused", "float32", "cuda")
    own = w.data_ptr()
    prediction.apply()
    assert w.data_ptr() != own
    prediction.undo()
    assert w.data_ptr() == own
