"""What islands cost: the bytes that each rank sends, and what it holds beside its part of the model."""

from __future__ import annotations

import json
import re

import pytest

SCRIPT = """
import gc, json, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
for layer in (*model, model):
    fully_shard(layer)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
def held():
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    tensors += [t._local_tensor for t in gc.get_objects() if hasattr(type(t), "to_local")]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
for step in range(20):
    optimizer.zero_grad()
    model(torch.randn(2, 256)).pow(2).mean().backward()
    most = held()
    optimizer.step()
part = sum(p.to_local().numel() * 4 for p in model.parameters())
print("held", json.dumps([most, part]), flush=True)
dist.destroy_process_group()
"""
PART = 4 * 8 * (256 * 256 + 256) // 2


def held(out: bytes) -> float:
    """Bytes of the rank that holds the most, as the backward is over, in units of its part of the weights."""
    found = [json.loads(each) for each in re.findall(r"held (.*)", out.decode())]
    assert {part for _, part in found} == {PART}
    return max(most / part for most, part in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "compression", "sent", "beside"),
    [("sync", "none", 1.0, 1.1), ("pipe", "none", 1.0, 5.1), ("pipe", "int8", 0.26, 6.1), ("pipe", "int4", 0.14, 6.1)],
)
def test_a_rank_sends_and_holds_multiples_of_its_part(
    launch, algorithm: str, compression: str, sent: float, beside: float
) -> None:
    """sent: in each step. beside: what it holds more than in plain torch."""
    plain = held(launch(SCRIPT, "-np", "2", "--inject", "none", "train.py").out)
    options = ["--algorithm", algorithm, "--compression", compression, "--warmup-steps", "4"]
    result = launch(SCRIPT, "-np", "4", "--island", "2", "--executor", "tcp", *options, "train.py")
    assert result.code == 0, result.err
    ranks = json.loads((result.logs / result.job / "report.json").read_text())["ranks"]
    counted = [rank["sent"] / 20 / PART for rank in ranks]
    assert 0.9 * sent < max(counted) <= sent, counted
    assert beside - 1.0 < (more := held(result.out) - plain) <= beside, more
