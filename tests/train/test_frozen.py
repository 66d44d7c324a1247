"""What is trained changes between backward and step, when gradients are under way already."""

from __future__ import annotations

import pytest
import torch
from harness.checks import assert_equal

TRAIN = """
    from harness.scenarios import batch
    def frozen_behind_backward(model, optimizer, step, at):
        model[0].requires_grad_(not (at == "step" and step % 9 > 6))
    def frozen_without_gradient(model, optimizer, step, at):
        model[2].requires_grad_(not (at == "step" and step % 9 > 6))
        if not model[2].weight.requires_grad:
            model[2].weight.grad = model[2].bias.grad = None
    def frozen_behind_every_backward(model, optimizer, step, at):
        model[:3].requires_grad_(at != "step")
    def unchanged(model, optimizer, step, at):
        pass
    def frozen_where_one_rank_uses_it(model, optimizer, step, at):
        model[2].requires_grad_(not (at == "step" and step % 9 > 5))
        if (rank + step) % 2 and at == "step":
            model[2].weight.grad = model[2].bias.grad = None
    def frozen_for_good(model, optimizer, step, at):
        if step == 9 and at == "step":
            model[2].requires_grad_(False)
    def unfrozen_behind_backward(model, optimizer, step, at):
        model[2].requires_grad_(at == "step" or step % 9 < 7)
    def added_behind_backward(model, optimizer, step, at):
        if step == 9 and at == "step":
            optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.02})
    found = {}
    CHANGES = (frozen_behind_backward, frozen_without_gradient, frozen_behind_every_backward, unchanged,
               frozen_where_one_rank_uses_it, frozen_for_good, unfrozen_behind_backward, added_behind_backward)
    for change in CHANGES if world > 1 else [c for c in CHANGES if c is not frozen_where_one_rank_uses_it]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        few = change is added_behind_backward
        optimizer = torch.optim.SGD(model[:3].parameters() if few else model.parameters(), lr=0.1, momentum=0.9)
        for step in range(24):
            change(model, optimizer, step, "forward")
            optimizer.zero_grad()
            model.zero_grad()
            batches = [batch(r, step, 0) for r in ([rank] if world > 1 else [0, 1])]
            x, y = (torch.cat(each) for each in zip(*batches))
            nn.functional.cross_entropy(model(x), y).backward()
            change(model, optimizer, step, "step")
            optimizer.step()
        found.update({f"{change.__name__} {k}": v.detach().clone() for k, v in model.state_dict().items()})
        del model, optimizer
    report(found)
"""


@pytest.mark.parametrize(
    "options", [["sync"], pytest.param(["pipe", "--warmup-steps", "100"], marks=pytest.mark.slow)], ids=["sync", "pipe"]
)
def test_it_trains_as_in_one_process(dadt_run, options: list[str]) -> None:
    """With small buckets, all but the last are under way when the script freezes parameters."""
    run = dadt_run(TRAIN, "--bucket-mb", "0.00002", "--algorithm", *options)
    (alone,) = dadt_run(TRAIN, launcher="python", np=1).ranks
    assert_equal(*run.ranks)
    for name, value in alone.items():
        torch.testing.assert_close(run.ranks[0][name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_it_trains_one_step_late(dadt_run) -> None:
    """Each gradient is applied one step late, also where its parameter is frozen behind each backward."""
    run = dadt_run(TRAIN, "--warmup-steps", "3", "--algorithm", "pipe")
    assert_equal(*run.ranks)
    found = run.ranks[0]
    for name in [name for name in found if name.startswith("unchanged ")]:
        other = name.replace("unchanged", "frozen_behind_every_backward")
        torch.testing.assert_close(found[other], found[name], rtol=0, atol=0, msg=name)
