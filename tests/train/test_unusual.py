"""Scripts that do what most do not: each part trains, asserts what it must see, and gives its weights."""

from __future__ import annotations

import pytest
from harness.checks import assert_equal

PARTS = """
    import copy, gc, warnings
    import torch.nn.functional as F
    from harness.scenarios import batch
    from torch.optim.swa_utils import AveragedModel, update_bn

    def fit(model, optimizer, step, shift=0.0):
        x, y = batch(rank, step, 0)
        optimizer.zero_grad()
        F.cross_entropy(model(x + shift), y).backward()

    def normed():
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def make(model, lr=0.05):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 100)  # a cycle: it outlives its name

    def weights(model):
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()

    def two_phases():
        gc.disable()
        model = normed()
        for phase in range(2):
            optimizer, schedule = make(model)
            model.train()
            for step in range(12):
                fit(model, optimizer, step, 5.0 * phase)
                if phase == 1:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                if phase == 1 and step == 4 and rank == 0:
                    gc.collect()                     # as the collector may, on one rank
        trained, mine = weights(model), model[1].running_mean.clone()
        model.eval()
        assert torch.equal(weights(model), trained)
        assert (model[1].running_mean - mine).abs().max() < 0.5   # of this phase, not of the first
        gc.enable()
        return model

    def left_out_after_clipping():
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(12):
            fit(model, optimizer, step)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if step in (2, 8):
                continue                             # by a norm that is equal on all ranks
            optimizer.step()
        return model

    class Around(torch.optim.Optimizer):
        def __init__(self, parameters):
            parameters = list(parameters)
            self.inner = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
            super().__init__(parameters, {"lr": 0.05})
        def step(self, closure=None):
            self.inner.step()

    def wrapper_and_clipping():
        model = nn.Linear(6, 3)
        optimizer = Around(model.parameters())
        for step in range(10):
            fit(model, optimizer, step)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return model

    def shared_encoder():
        encoder, one, two = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        first = torch.optim.SGD([*encoder.parameters(), *one.parameters()], lr=0.05, momentum=0.9)
        second = torch.optim.SGD([*encoder.parameters(), *two.parameters()], lr=0.05, momentum=0.9)
        for step in range(12):
            for head, optimizer in ((one, first), (two, second)):
                x, y = batch(rank, step, 0)
                optimizer.zero_grad()
                F.cross_entropy(head(encoder(x)), y).backward()
                before = weights(encoder)
                optimizer.step()
        return nn.ModuleList([encoder, one, two])

    def late_layer():
        first, late = nn.Linear(6, 8), None
        optimizer = torch.optim.SGD(first.parameters(), lr=0.05)
        for step in range(12):
            if step == 6:
                late = nn.Linear(8, 3)               # from the rank's own stream: another on each rank
                optimizer.add_param_group({"params": late.parameters(), "decay": lambda s: 1.0})
            x, y = batch(rank, step, 0)
            out = first(x).tanh()
            optimizer.zero_grad()
            F.cross_entropy(late(out) if late else out, y).backward()
            optimizer.step()
        return nn.ModuleList([first, late])

    def unfrozen():
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(12):
            model[0].requires_grad_(step >= 6)
            fit(model, optimizer, step)
            optimizer.step()
        return model

    class Peak(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)
            self.register_buffer("peak", torch.tensor(3.0))
        def forward(self, x):
            self.peak.copy_(torch.maximum(self.peak, x.detach().abs().max()))
            return self.linear(x)

    def buffer_that_one_rank_changes():
        model = Peak()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(8):
            fit(model, optimizer, step, 10.0 * rank)
            optimizer.step()
        assert model.eval().peak > 3.0
        return model

    def averages_and_copies():
        model = normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        average = AveragedModel(model, use_buffers=True)
        for step in range(12):
            fit(model, optimizer, step, float(rank))
            optimizer.step()
            average.update_parameters(model)
        copied = copy.deepcopy(model)
        update_bn([torch.full((8, 6), 7.0) + torch.randn(8, 6) for _ in range(4)], model)
        updated = model[1].running_mean.clone()
        assert torch.equal(model.eval()[1].running_mean, updated)
        return nn.ModuleList([model, average, copied])

    def clipping_in_a_closure():
        model = nn.Linear(6, 3)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        for step in range(3):
            def closure():
                x, y = batch(rank, step, 0)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                return loss
            optimizer.step(closure)
        return model

    def tied_weights_given_twice():
        one, other = nn.Linear(6, 6), nn.Linear(6, 6)
        other.weight = one.weight
        model, head = nn.Sequential(one, nn.Tanh(), other), nn.Linear(6, 3)
        twice = [*one.parameters(), *other.parameters(), *head.parameters()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = torch.optim.RMSprop(twice, lr=0.01, momentum=0.9)   # predicted by displacements
        whole = nn.Sequential(model, head)
        for step in range(12):
            before = whole.state_dict()["0.0.weight"].clone()
            fit(whole, optimizer, step)
            assert step == 0 or torch.equal(whole.state_dict()["0.0.weight"], before)
            optimizer.step()
        return whole

    kept = []

    def replaced_parameters():
        model = normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(16):
            if step in (6, 11):
                if rank == 0:
                    kept.extend(model.parameters())  # not collected here, but on the other rank
                for layer in model.children():
                    for name in list(layer._parameters):
                        layer._parameters[name] = nn.Parameter(torch.randn_like(layer._parameters[name]))
                optimizer.param_groups[0]["params"] = list(model.parameters())
                optimizer.state.clear()
            fit(model, optimizer, step)
            optimizer.step()
        return model

    def optimizers_in_turn():
        model = nn.Linear(6, 3)
        both = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), torch.optim.Adam(model.parameters())
        for step in range(16):
            optimizer = both[step % 2]
            fit(model, optimizer, step)
            optimizer.step()
        return model

    def saved_in_inference_mode():
        model = normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(14):
            fit(model, optimizer, step)
            optimizer.step()
            if step in (1, 6, 9):
                with torch.inference_mode():
                    model.eval()(torch.ones(4, 6))
                    copy.deepcopy([model.state_dict(), optimizer.state_dict()])
                    model.train()
        return model

    def a_parameter_without_elements():
        model = normed()
        model.dummy = nn.Parameter(torch.empty(0))   # to look up its device
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(8):
            fit(model, optimizer, step)
            optimizer.step()
        return model

    found = {}
    for part in (a_parameter_without_elements, two_phases, left_out_after_clipping, wrapper_and_clipping,
                 shared_encoder, late_layer, unfrozen,
                 buffer_that_one_rank_changes, averages_and_copies, clipping_in_a_closure,
                 tied_weights_given_twice, replaced_parameters, optimizers_in_turn, saved_in_inference_mode):
        found.update({f"{part.__name__}.{k}": v.clone() for k, v in part().state_dict().items()})
        gc.collect()
    report(found)
"""


@pytest.mark.parametrize("algorithm", ["pipe", pytest.param("sync", marks=pytest.mark.slow)])
def test_unusual_scripts_keep_replicas_equal(dadt_run, algorithm) -> None:
    run = dadt_run(PARTS, "--warmup-steps", "3", "--algorithm", algorithm)
    assert_equal(run.ranks[0], run.ranks[1], "replicas")
    assert all(value.isfinite().all() for value in run.ranks[0].values())
    assert "Warning" not in run.output


OWN_CLIPPING = """
    from harness.scenarios import batch
    def by_version(gradient): gradient.mul_(1e-6)
    def by_data(gradient): gradient.data.clamp_(-1e-6, 1e-6)
    def by_numpy(gradient): gradient.numpy()[...] *= -1e-6
    def moves(change):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        farthest = []
        for step in range(10):
            x, y = batch(rank, step, 0)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                change(p.grad)
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            farthest.append(max(float((p - b).abs().max()) for p, b in zip(model.parameters(), before)))
        return farthest
    report({change.__name__: moves(change) for change in (by_version, by_data, by_numpy)})
"""


def test_sync_sees_what_the_script_does_to_gradients(dadt_run) -> None:
    """With small buckets, all but the last are under way when the script changes their gradients."""
    run = dadt_run(OWN_CLIPPING, "--algorithm", "sync", "--bucket-mb", "0.00002")
    for change, moves in run.ranks[0].items():
        assert all(0 < moved < 1e-6 for moved in moves), (change, moves)


ONE_GRADIENT = """
    from harness.scenarios import batch
    def by_data(gradient): gradient.data.view(-1)[gradient.numel() // 2:] = 0
    def by_numpy(gradient): gradient.numpy().reshape(-1)[gradient.numel() // 2:] = 0
    def stands(change, index):
        # Gradients are sent once they are complete, the last ones first: all of these but one before the step.
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3000), nn.Tanh(), nn.Linear(3000, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        chosen = list(model.parameters())[index]
        halves = []
        for step in range(10):
            x, y = batch(rank, step, 0)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            halves.append(chosen.detach().reshape(-1)[chosen.numel() // 2:].clone())
            change(chosen.grad)
            optimizer.step()
        return all(torch.equal(half, halves[0]) for half in halves)
    report([stands(change, index) for change in (by_data, by_numpy) for index in (2, 3, 5)])
"""


def test_sync_sees_a_change_of_half_a_gradient(dadt_run) -> None:
    """Of a large one, and of small ones, in ways that autograd does not notice."""
    run = dadt_run(ONE_GRADIENT, "--algorithm", "sync", "--bucket-mb", "0.00002")
    assert run.ranks == [[True] * 6] * 2


SCALED = """
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})
            self.inner = torch.optim.SGD(self.param_groups, lr=0.1)
        def step(self, closure=None):
            self.inner.step()
    model = nn.Linear(6, 3)
    optimizer = Wrapper(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    report(optimizer.param_groups[0]["lr"])
"""


def test_learning_rates_are_scaled_once(dadt_run) -> None:
    assert dadt_run(SCALED, "--scale-lr", "linear").ranks == [0.2, 0.2]
