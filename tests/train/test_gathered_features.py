"""A loss over pairs of all ranks' samples, in a script that gathers features itself, as those of SimCLR and CLIP do."""

from __future__ import annotations

import pytest
import torch
from harness.checks import assert_near, assert_replicas_equal
from torch import nn
from torch.nn import functional as F

SAMPLES, BATCH, STEPS = 48, 8, 12
SCRIPT = """
    import torch.distributed as dist
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("gloo")

    class GatherLayer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, features):
            gathered = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, features)
            return tuple(gathered)

        @staticmethod
        def backward(ctx, *gradients):
            all_of = torch.stack(gradients)
            dist.all_reduce(all_of)
            return all_of[dist.get_rank()]

    torch.manual_seed(0)
    images, texts = torch.randn({samples}, 6), torch.randn({samples}, 6)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    first = {{name: value.clone() for name, value in model.state_dict().items()}}
    trained = DistributedDataParallel(model) if {wrapped} else model
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range({steps}):
        begin = {batch} * step % {samples} + {batch} // 2 * rank
        mine = slice(begin, begin + {batch} // 2)
        both = trained(torch.cat([images[mine], texts[mine]]))
        a, b = (F.normalize(torch.cat(GatherLayer.apply(each)), dim=1) for each in both.chunk(2))
        F.cross_entropy(a @ b.T / 0.2, torch.arange({batch})).backward()
        optimizer.step()
        optimizer.zero_grad()
    report({{"state": model.state_dict(), "first": first, "images": images, "texts": texts}})
"""


@pytest.mark.parametrize("wrapped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_is_the_loss_of_one_process(dadt_run, wrapped: bool) -> None:
    script = SCRIPT.format(samples=SAMPLES, batch=BATCH, steps=STEPS, wrapped=wrapped)
    run = dadt_run(script, "--algorithm", "sync")
    assert_replicas_equal(run)
    found = run.ranks[0]
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    model.load_state_dict(found["first"])
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(STEPS):
        joint = slice(BATCH * step % SAMPLES, BATCH * step % SAMPLES + BATCH)
        a, b = (F.normalize(model(found[name][joint]), dim=1) for name in ("images", "texts"))
        F.cross_entropy(a @ b.T / 0.2, torch.arange(BATCH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_near(found["state"], model.state_dict(), "one process")
    changed = max(float((model.state_dict()[name] - value).abs().max()) for name, value in found["first"].items())
    assert changed > 0.05


def test_late_averages_leave_replicas_equal(dadt_run) -> None:
    run = dadt_run(SCRIPT.format(samples=SAMPLES, batch=BATCH, steps=STEPS, wrapped=False), "--warmup-steps", "4")
    assert_replicas_equal(run)
    assert " of them delayed by one" in run.output
