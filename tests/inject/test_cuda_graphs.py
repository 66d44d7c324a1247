"""CUDA graphs are left out of training. What a GPU does with it is tested in tests/gpu."""

from __future__ import annotations

import pytest
from harness.checks import assert_replicas_equal

COMPILED = """
from torch._inductor import config
found = []
class Recorded(torch._TorchCompileInductorWrapper):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        found.append((self.config, config.triton.cudagraphs))
torch._TorchCompileInductorWrapper = Recorded
model = nn.Linear(4, 4)
torch.compile(model, mode="reduce-overhead")
torch.compile(mode="max-autotune", dynamic=False)(model)
torch.compile(model, options={"triton.cudagraphs": True, "max_autotune": True})
config.triton.cudagraphs = True
model.compile()
assert torch.compile(model, backend="cudagraphs")(torch.ones(2, 4)).shape == (2, 4)
assert torch.cuda.make_graphed_callables(model, (torch.ones(2, 4),)) is model
report([({k: v for k, v in c.items() if k in ("triton.cudagraphs", "max_autotune")}, d) for c, d in found])
"""


def test_compiled_code_makes_no_graph(dadt_run) -> None:
    run = dadt_run(COMPILED)
    searched = {"max_autotune": True}
    without = [({}, False), (searched, False), ({"triton.cudagraphs": False} | searched, False), ({}, False)]
    assert run.ranks == [without] * 2
    assert "make_graphed_callables runs without CUDA graphs" in run.output


CAPTURED = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def capture():  # as within torch.cuda.graph(...) on a GPU, of which there is none here
    torch.cuda.is_initialized = torch.cuda.is_current_stream_capturing = lambda: True
for number in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).sum()
    if number == 2 and {backward}: capture()
    loss.backward()
    if number == 2: capture()
    optimizer.step()
    report({{"state": model.state_dict(), "step": number}})
"""


@pytest.mark.parametrize("backward", [True, False])
def test_a_captured_step_is_refused(dadt_run, backward: bool) -> None:
    run = dadt_run(CAPTURED.format(backward=backward), code=2)
    assert "the script captures a training step in a CUDA graph" in run.output
    assert [found["step"] for found in run.ranks] == [1, 1]
    assert_replicas_equal(run)
