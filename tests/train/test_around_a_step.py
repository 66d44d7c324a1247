"""What scripts do around a delayed step that few expect: replicas stay equal, nothing is lost, nothing blows up."""

from __future__ import annotations

import pytest
import torch
from harness.checks import assert_equal
from harness.job import Run, joined

SHARED = """
    from harness.scenarios import batch
    from torch.nn.functional import cross_entropy
    STEPS = 24
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    def loss_of(step): x, y = batch(rank, step, 0); return cross_entropy(model(x), y)
    def weights(m=model): return {k: v.clone() for k, v in m.state_dict().items()}
    def moved(before): return float(sum((v - before[k]).pow(2).sum() for k, v in weights().items())) ** 0.5
"""

FUSED = """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(step)
        scaler.scale(loss * float("inf") if (rank, step) == (1, 10) else loss).backward()
        before = weights()
        scaler.step(optimizer)
        scaler.update()
        # The first late one applies nothing; the infinity comes a step late.
        assert (moved(before) == 0) == (step in (4, 11)), step
    assert scaler.get_scale() == 512.0
    report({"state": weights()})
"""

SCALER_ENDS = """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(STEPS):
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, enabled=step < 10 or step > 17)
        optimizer.zero_grad()
        scaler.scale(loss_of(step)).backward()
        before = weights()
        if step in (10, 11, 14):                       # to log it
            norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
            assert norm < 10, (step, norm)
        if step == 15:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        assert (0 < moved(before) < 0.1) or step == 4, (step, moved(before))
    report({"state": weights()})
"""

PART_OF_THE_GRADIENTS = """
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        model[0].zero_grad()
        before, first = weights(), model[0].weight.detach().clone()
        optimizer.step()
        assert moved(before) < 2e-3 and torch.equal(model[0].weight, first), step
    report({"state": weights()})
"""

ALL_OF_THE_GRADIENTS = """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss_of(step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = weights()
        if step % 5 == 3:
            for part in (model[0], model[2], model[4]):
                part.zero_grad(set_to_none=False)      # the step is left out
        else:
            optimizer.step()
        optimizer.zero_grad()
        assert (moved(before) == 0) == (step % 5 == 3 or step == 4), step
    report({"state": weights()})
"""

OTHER_MEMORY = """
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.zeros(4))
        def forward(self, x):
            self.table = torch.ones(4 + rank)          # as long as the longest text so far
            return x
    model.append(Table())
    def weights(): return {k: v.clone() for k, v in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(step).backward()
        for p in model.parameters():
            p.data = p.data * 0.999                    # decay by hand, before the step
        optimizer.step()
    report({"state": weights()})
"""

SHARPNESS = """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(step).backward()
        old = [p.data.clone() for p in model.parameters()]
        for p in model.parameters():
            p.data.add_(p.grad, alpha=0.05)            # the rank's own way uphill
        optimizer.zero_grad()
        loss_of(step).backward()
        for p, o in zip(model.parameters(), old):
            p.data = o
        optimizer.step()
    report({"state": weights()})
"""

LATE_BACKWARD = """
    from dadt.errors import DadtError
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loss_of(0).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    hidden = model[0](batch(rank, 0, 0)[0]).detach()
    model[2](hidden).pow(2).mean().backward()          # reaches a layer in the middle only
    try:
        optimizer.step()
    except DadtError as error:
        assert "a backward added to gradients that were already clipped" in str(error)
    else:
        raise AssertionError("own gradients were added to averages")
    report({"state": {}})
"""

IN_TURN = """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        model[0].requires_grad_(step % 2 == 0)
        model[2].requires_grad_(step % 2 == 1)
        model[4].requires_grad_(step % 2 == 1)
        optimizer.zero_grad()
        loss_of(step).backward()
        before = weights()
        optimizer.step()
        assert step < 8 or moved(before) > 0, step     # synchronous again
    report({"state": weights()})
"""

IN_STAGES = """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(STEPS):
        for module in model[:4]:
            module.requires_grad_(step >= 12)
        model[4].requires_grad_(step < 12)
        optimizer.zero_grad()
        scaler.scale(loss_of(step)).backward()
        before = weights()
        scaler.step(optimizer)
        scaler.update()
        assert (moved(before) == 0) == (step in (4, 12)), step
    report({"state": weights()})
"""

SAME_MEMORY = """
    import copy
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight.data = model[0].weight.data
    predicted = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        true = model[0].weight.detach().clone()
        loss_of(step).backward()
        predicted += not torch.equal(model[2].weight, true)
        seen = copy.deepcopy(model[2].weight) if step % 2 else model[2].state_dict()["weight"].clone()
        assert torch.equal(seen, true), step
        optimizer.step()
    assert predicted > 12
    assert model[2].weight.data_ptr() == model[0].weight.data_ptr()
    report({"state": weights(model)})
"""

TRANSFORMS = """
    from torch.func import functional_call, grad, vmap
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    def loss(parameters, x, y): return cross_entropy(functional_call(model, parameters, (x[None],)), y[None])
    for step in range(STEPS):
        parameters = dict(model.named_parameters())
        gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, *batch(rank, step, 0))
        for name, p in parameters.items():
            p.grad = gradients[name].mean(0).detach()
        optimizer.step()
    report({"state": weights()})
"""

SCRIPTED = """
    plain, model = model, torch.jit.script(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(step).backward()
        optimizer.step()
    report({"state": weights(model)})
"""

AVERAGE = """
    from torch.optim.swa_utils import AveragedModel
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    average = AveragedModel(model)
    predicted = 0
    for step in range(STEPS):
        true = weights()
        optimizer.zero_grad()
        loss_of(step).backward()
        ahead = model[0].weight.detach().clone()
        average.update_parameters(model)               # between a backward and its step
        assert torch.equal(model[0].weight, ahead)
        predicted += not torch.equal(true["0.weight"], ahead)
        optimizer.step()
    assert predicted > 12
    report({"state": {**weights(), **{f"average {k}": v for k, v in average.state_dict().items()}}})
"""

REENTRANT = """
    from torch.utils.checkpoint import checkpoint
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        x, y = batch(rank, step, 0)
        true = weights()
        optimizer.zero_grad()
        out = checkpoint(model, x.requires_grad_(), use_reentrant=True)
        seen = []
        out.register_hook(lambda gradient: seen.append(model[0].weight.detach().clone()))
        cross_entropy(out, y).backward()
        assert torch.equal(seen[0], true["0.weight"]) and torch.equal(model[0].weight, seen[0])
        optimizer.step()
    report({"state": weights()})
"""

SPARSE_ZEROS = """
    model = nn.Embedding(12, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        x, y = batch(rank, step, 0)
        cross_entropy(model(x.abs().sum(1).long() % 12), y).backward()
        optimizer.step()
    report({"state": weights(model)})
"""

SCRIPTS = {
    "fused optimizer with a scaler": FUSED,
    "scaler that ends and begins": SCALER_ENDS,
    "gradients of one module dropped after clipping": PART_OF_THE_GRADIENTS,
    "gradients of all modules dropped after clipping": ALL_OF_THE_GRADIENTS,
    "weights in other memory before the step": OTHER_MEMORY,
    "sharpness-aware steps": SHARPNESS,
    "backward after clipping": LATE_BACKWARD,
    "parameters that are trained in turn": IN_TURN,
    "parameters that are trained in stages": IN_STAGES,
    "parameters in the same memory": SAME_MEMORY,
    "gradients by transforms": TRANSFORMS,
    "scripted model": SCRIPTED,
    "average before the step": AVERAGE,
    "model in a reentrant checkpoint": REENTRANT,
    "sparse gradients set to zero": SPARSE_ZEROS,
}


@pytest.fixture(scope="module")
def shared(shared_run) -> Run:
    return shared_run(joined(**{name: SHARED + script for name, script in SCRIPTS.items()}), "--warmup-steps", "4")


@pytest.mark.parametrize("name", SCRIPTS)
def test_replicas_stay_equal(shared, name) -> None:
    one, other = shared.of(name).ranks
    assert_equal(one["state"], other["state"], name)
    assert all(torch.isfinite(value).all() for value in one["state"].values())


def test_what_cannot_be_predicted_is_told(shared) -> None:
    said = shared.of("sharpness-aware steps").output
    assert said.count("the script changes weights") == 2
    assert said.count("the script trains other parameters") == 1
    assert said.count("runs within the backward (a checkpoint of the whole model)") == 1
    assert "have grown beyond" not in said


@pytest.mark.slow
def test_a_lazy_model_is_told(dadt_run) -> None:
    script = """
    model = nn.LazyLinear(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    """
    done = dadt_run(script, code=None)
    assert done.code == 1 and "SGD has parameters of lazy modules" in done.output
    first = script.replace("    model(", "    with torch.no_grad(): model(torch.ones(2, 4))\n    model(")
    assert dadt_run(first).code == 0
