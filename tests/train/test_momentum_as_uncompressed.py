"""What momentum in one bit must not change: how much weight decay and clipping count, which weights stay as they are,
and what scripts may do with optimizers and parameters."""

from __future__ import annotations

import pytest
import torch
from harness.checks import assert_equal
from harness.job import joined

from dadt.train.unseen import UnseenWeights

OPTIONS = "--warmup-steps", "4", "--executor", "shm"
STEADY = """
    weights = nn.Parameter(torch.ones(32, 32))
    optimizer = torch.optim.{optimizer}
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    for step in range(160):
        optimizer.zero_grad()
        (weights * {gradient}).sum().backward()
        {clip}
        optimizer.step()
        schedule.step()
    (state,) = optimizer.state.values()
    report([weights.mean().item(), state["{momentum}"].mean().item()])
"""
"""Gradients are the same in each step, so that one bit tells them without an error, and a step late, too."""
CLIP = "nn.utils.clip_grad_norm_([weights], 0.1)"
TRAININGS = {
    "sgd": STEADY.format(
        optimizer="SGD([weights], lr=0.01, momentum=0.9, weight_decay=0.1)",
        gradient=0.0,
        clip="",
        momentum="momentum_buffer",
    ),
    "adam": STEADY.format(
        optimizer="Adam([weights], lr=1e-5, weight_decay=0.1)", gradient=0.01, clip="", momentum="exp_avg"
    ),
    "maximize": STEADY.format(
        optimizer="Adam([weights], lr=1e-5, weight_decay=0.1, maximize=True)",
        gradient=0.01,
        clip="",
        momentum="exp_avg",
    ),
    "clipped": STEADY.format(optimizer="Adam([weights], lr=0.01)", gradient=1.0, clip=CLIP, momentum="exp_avg"),
    "clipped-sgd": STEADY.format(
        optimizer="SGD([weights], lr=0.01, momentum=0.9)", gradient=1.0, clip=CLIP, momentum="momentum_buffer"
    ),
}


@pytest.mark.parametrize("algorithm", ["pipe", pytest.param("sync", marks=pytest.mark.slow)])
def test_weight_decay_and_clipping_count_as_much(algorithm, dadt_run):
    every = [
        dadt_run(joined(**TRAININGS), "--algorithm", algorithm, "--compression", compression, *OPTIONS)
        for compression in ("none", "momentum:1")
    ]
    assert every[1].output.count("from now on momentum is sent") == len(TRAININGS)
    for name in TRAININGS:
        plain, told = (run.of(name).ranks for run in every)
        assert told[0] == told[1], name
        assert told[0] == pytest.approx(plain[0], rel=0.03), name


NORMS = """
    weights = nn.Parameter(torch.zeros(50, 50))
    optimizer = torch.optim.{optimizer}
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    norms = []
    for step in range(120):
        noise = torch.randn(50, 50, generator=torch.Generator().manual_seed(1000 * rank + step))
        optimizer.zero_grad()
        (weights * noise).sum().backward()
        norms.append(nn.utils.clip_grad_norm_([weights], 1e9))
        optimizer.step()
        schedule.step()
    report([sum(norms[:40]) / 40, sum(norms[-40:]) / 40])
"""


def test_scripts_see_the_norm_of_averages_of_noise(dadt_run):
    """It is smaller than that of a rank's own gradients by the root of the number of ranks."""
    names = {"sgd": "SGD([weights], lr=1e-4, momentum=0.9)", "adamax": "Adamax([weights], lr=1e-6)"}
    text = joined(**{name: NORMS.format(optimizer=optimizer) for name, optimizer in names.items()})
    run = dadt_run(text, "--algorithm", "sync", "--compression", "momentum:1", *OPTIONS)
    assert run.output.count("from now on momentum is sent") == 2
    for name in names:
        for before, later in run.of(name).ranks:
            assert before == pytest.approx(50 / 2**0.5, rel=0.05), name
            assert later == pytest.approx(before, rel=0.1), name


RESTS = """
    from harness.scenarios import snapshot
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 64, padding_idx=0), nn.Flatten(), nn.Linear(256, 8))
    model[2].weight.register_hook(lambda g: g * mask)
    mask = torch.ones(8, 256)
    mask[:, 100:103] = 0
    optimizer = torch.optim.{optimizer}
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 160)
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(160):
        some = torch.Generator().manual_seed(1000 * rank + step)
        # Letter 49 comes on rank 1 alone, and late.
        x = torch.randint(0, 50 if rank and step > 60 else 49, (16, 4), generator=some)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x.sum(1) % 8).backward()
        optimizer.step()
        schedule.step()
    moved = [(p.detach() - old).abs().amax(1) for p, old in zip(model[::2].parameters(), before) if p.dim() > 1]
    rest = (model[2].weight.detach() - before[1])[:, 100:103]
    report({{"state": snapshot(model, optimizer), "moved": moved[0], "masked": rest}})
"""
RESTING = {
    "adam": "Adam(model.parameters(), lr=1e-2)",
    "adamax": "Adamax(model.parameters(), lr=1e-2)",
    "sgd": "SGD(model.parameters(), lr=0.1, momentum=0.9)",
}


@pytest.mark.parametrize("algorithm", ["pipe", pytest.param("sync", marks=pytest.mark.slow)])
def test_weights_without_gradients_stay_as_they_are(algorithm, dadt_run):
    text = joined(**{name: RESTS.format(optimizer=optimizer) for name, optimizer in RESTING.items()})
    run = dadt_run(text, "--algorithm", algorithm, "--compression", "momentum:1", *OPTIONS)
    assert run.output.count("from now on momentum is sent") == len(RESTING)
    for name in RESTING:
        first, second = run.of(name).ranks
        assert_equal(first["state"], second["state"], name)
        assert first["moved"][0] == 0 and first["masked"].abs().max() == 0, name
        assert first["moved"][1:].min() > 0, name  # letter 49, too


DECAYS = """
    weights = nn.Parameter(torch.ones(32, 32))
    optimizer = torch.optim.{optimizer}
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 160)
    for step in range(158):
        noise = torch.randn(32, 32, generator=torch.Generator().manual_seed(1000 * rank + step))
        noise[:, :4] = 0
        optimizer.zero_grad()
        (weights * noise).sum().backward()
        optimizer.step()
        schedule.step()
    report([weights[:, :4].tolist(), weights[:, 4:].tolist()])
"""
DECAYING = {
    "adam": DECAYS.format(optimizer="Adam([weights], lr=1e-3, weight_decay=0.1)"),
    "adamax": DECAYS.format(optimizer="Adamax([weights], lr=1e-3, weight_decay=0.1)"),
    "sgd": DECAYS.format(optimizer="SGD([weights], lr=1e-2, momentum=0.9, weight_decay=0.1)"),
}


@pytest.mark.parametrize("algorithm", ["pipe", pytest.param("sync", marks=pytest.mark.slow)])
def test_weights_without_gradients_decay_alone(algorithm, dadt_run):
    plain, told = (
        dadt_run(joined(**DECAYING), "--algorithm", algorithm, "--compression", compression, *OPTIONS)
        for compression in ("none", "momentum:1")
    )
    assert told.output.count("from now on momentum is sent") == len(DECAYING)
    for name in DECAYING:
        first, second = told.of(name).ranks
        assert first == second, name
        assert torch.tensor(first[0]) == pytest.approx(torch.tensor(plain.of(name).ranks[0][0]), abs=2e-3), name


CHANGES = """
    import gc, weakref
    from harness.scenarios import snapshot
    torch.manual_seed(0)
    model = nn.Linear(64, 8, bias=False)
    other = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.Adam([model.weight, other], lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)
    right = torch.randn(64, 8, generator=torch.Generator().manual_seed(7))
    data, gone = torch.Generator().manual_seed(rank), []
    for step in range(120):
        x = torch.randn(16, 64, generator=data)
        if step in (70, 90):
            # As Gaussian splatting does: a parameter is replaced by one of another size, with its state.
            group = optimizer.param_groups[0]
            more = nn.Parameter(torch.cat([other, other[:2]]).detach())
            state = optimizer.state.pop(other)
            optimizer.state[more] = {k: torch.cat([v, v[:2]]) if v.dim() else v for k, v in state.items()}
            group["params"][1] = more
            gone.append(weakref.ref(other))
            other = more
        loss = nn.functional.cross_entropy(model(x) * other[:8], (x @ right).argmax(1)) + other.square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step == 100:
            for state in optimizer.state.values():
                for value in state.values():
                    value.zero_()                            # begins anew, in place
        optimizer.step()
        schedule.step()
    del group, state, value
    gc.collect()
    report({"state": snapshot(model, optimizer), "loss": loss.item(), "kept": [ref() is not None for ref in gone]})
"""


@pytest.mark.parametrize("algorithm", ["pipe", pytest.param("sync", marks=pytest.mark.slow)])
def test_parameters_are_replaced_and_states_begin_anew(algorithm, dadt_run):
    plain, run = (
        dadt_run(CHANGES, "--algorithm", algorithm, "--compression", compression, *OPTIONS)
        for compression in ("none", "momentum:1")
    )
    assert "from now on momentum is sent" in run.output
    first, second = run.ranks
    assert_equal(first["state"], second["state"])
    assert first["loss"] == pytest.approx(plain.ranks[0]["loss"], rel=0.1)
    assert not any(first["kept"] + second["kept"])


OVERFLOWS = """
    from harness.scenarios import batch, mlp, snapshot
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(60):
        x, y = batch(rank, step, 0)
        loss = nn.functional.cross_entropy(model(x), y)
        if rank == 1 and step == 30:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    report([scaler.get_scale(), snapshot(model, optimizer)])
"""


@pytest.mark.parametrize("algorithm", ["pipe", "sync"])
def test_one_overflow_skips_one_step(algorithm, dadt_run):
    run = dadt_run(OVERFLOWS, "--algorithm", algorithm, "--compression", "momentum:1", *OPTIONS)
    assert "from now on momentum is sent" in run.output
    (scale, first), (_, second) = run.ranks
    assert scale == 512.0
    assert_equal(first, second)


SKIPS = """
    weights = nn.Parameter(torch.zeros(50, 50))
    optimizer = torch.optim.Adam([weights], lr=1e-6, betas=(0.9, 0.9))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    for step in range(260):
        noise = torch.randn(50, 50, generator=torch.Generator().manual_seed(1000 * rank + step))
        if step == 60 and (rank == 1 or {all_ranks}):
            noise[:10] = float("nan")
        optimizer.zero_grad()
        (weights * noise).sum().backward()
        if nn.utils.clip_grad_norm_([weights], 1e9).isfinite():
            optimizer.step()
        schedule.step()
    report(optimizer.state[weights]["exp_avg_sq"][:10].mean().item())
"""


@pytest.mark.parametrize("algorithm", ["pipe", pytest.param("sync", marks=pytest.mark.slow)])
def test_v_is_right_after_a_step_that_the_script_skipped(algorithm, dadt_run):
    text = joined(one=SKIPS.format(all_ranks=False), all=SKIPS.format(all_ranks=True))
    run = dadt_run(text, "--algorithm", algorithm, "--compression", "momentum:1", *OPTIONS)
    for name in ("one", "all"):
        assert run.of(name).ranks == [pytest.approx(0.5, rel=0.15)] * 2, name


LINES = """
    weights = nn.Parameter(torch.ones(8, 8))
    optimizer = torch.optim.{optimizer}
    for step in range(12):
        def closure():
            optimizer.zero_grad()
            loss = (weights * (rank + 1)).square().sum()
            loss.backward()
            return loss
        optimizer.step(closure)
    report(weights.detach())
"""


def test_lines_say_what_travels(dadt_run):
    names = {
        "without-momentum": "Adam([weights], lr=1e-3, betas=(0.0, 0.9))",
        "short": "Adam([weights], lr=1e-3, betas=(0.5, 0.999))",
        "lbfgs": "LBFGS([weights])",
        "muon": "Muon([weights])",
    }
    text = joined(**{name: LINES.format(optimizer=optimizer) for name, optimizer in names.items()})
    run = dadt_run(text, "--algorithm", "sync", "--compression", "momentum:1", *OPTIONS)
    bits = "gradients are sent in 4 bits, as with int4, since"
    assert f"{bits} Adam has no momentum" in run.output
    assert f"{bits} Adam has a beta1 of 0.5, and 0.8 is the least" in run.output
    assert f"{bits} the step of Muon is not known" in run.output
    assert "are averaged at once, uncompressed, and no step is late" in run.output
    assert "the step of LBFGS" not in run.output
    for name in names:
        assert torch.equal(*run.of(name).ranks), name


def test_a_group_that_comes_later_may_end_it(dadt_run):
    run = dadt_run(
        """
        from harness.scenarios import snapshot
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.01, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        for step in range(60):
            if step == 40:
                optimizer.add_param_group({"params": list(model[1].parameters()), "momentum": 0.0})
            x = torch.randn(16, 16, generator=torch.Generator().manual_seed(1000 * rank + step))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        report(snapshot(model, optimizer))
        """,
        *("--algorithm", "pipe", "--compression", "momentum:1", *OPTIONS),
    )
    assert "gradients are sent in 4 bits, as with int4, since SGD has no momentum" in run.output
    assert_equal(*run.ranks)


TURNS = """
    heads = [nn.Parameter(torch.zeros(64, 64)) for _ in range(2)]
    optimizer = torch.optim.{optimizer}
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 160)
    means = torch.zeros(2, 64, 64)
    for step in range(158):
        noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(1000 * rank + step))
        optimizer.zero_grad()
        (heads[{which}] * (torch.linspace(-1, 1, 64) + noise)).sum().backward()
        optimizer.step()
        schedule.step()
        if step >= 60:
            for mean, state in zip(means, optimizer.state.values()):
                mean += state["{momentum}"]
    report({{"weights": torch.stack(list(heads)).detach(), "means": means}})
"""
ADAM, SGD = "AdamW(heads, lr=1e-3)", "SGD(heads, lr=1e-3, momentum=0.9, weight_decay=0.1)"
IN_TURN = {
    "two": TURNS.format(optimizer=ADAM, which="step % 2", momentum="exp_avg"),
    "four": TURNS.format(optimizer=ADAM, which="step % 4 // 3", momentum="exp_avg"),
    "blocks": TURNS.format(optimizer=SGD, which="step // 3 % 2", momentum="momentum_buffer"),
}


@pytest.mark.parametrize("algorithm", ["pipe", "sync"])
def test_parameters_may_be_trained_in_turn(algorithm, dadt_run):
    """In each step some have no gradient on any rank."""
    plain, told = (
        dadt_run(joined(**IN_TURN), "--algorithm", algorithm, "--compression", compression, *OPTIONS)
        for compression in ("none", "momentum:1")
    )
    assert told.output.count("from now on momentum is sent") == len(IN_TURN)
    for name in IN_TURN:
        first, second = told.of(name).ranks
        assert_equal(first, second, name)
        for mean, right in zip(first["means"], plain.of(name).ranks[0]["means"], strict=True):
            assert (mean - right).norm() < 0.05 * right.norm(), name


THREADS = """
    torch.set_num_threads(1 + rank)
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.zeros(300, 300 + i)) for i in range(6)]
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    noise = torch.Generator().manual_seed(rank)
    for step in range(60):
        optimizer.zero_grad()
        sum((w * (0.5 + torch.randn(w.shape, generator=noise))).sum() for w in weights).backward()
        optimizer.step()
        schedule.step()
    report({str(i): w.detach() for i, w in enumerate(weights)})
"""


def test_ranks_may_have_different_numbers_of_threads(dadt_run):
    """Sums of many values depend on it."""
    run = dadt_run(THREADS, "--algorithm", "sync", "--compression", "momentum:1", *OPTIONS)
    assert "from now on momentum is sent" in run.output
    assert_equal(*run.ranks)


EMPTY = """
    weights = nn.Parameter(torch.zeros(50, 50))
    optimizer = torch.optim.AdamW([weights], lr=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    norms = []
    for step in range(120):
        noise = torch.randn(50, 50, generator=torch.Generator().manual_seed(1000 * rank + step))
        optimizer.zero_grad()
        (weights * noise * (step < 90 or rank == 0)).sum().backward()
        norms.append(nn.utils.clip_grad_norm_([weights], 1e9))
        optimizer.step()
        schedule.step()
    report([float(norm) for norm in norms[92:]])
"""


def test_scripts_see_the_norm_of_averages_where_a_rank_has_gradients_of_zero(dadt_run):
    run = dadt_run(EMPTY, "--algorithm", "sync", "--compression", "momentum:1", *OPTIONS)
    assert "from now on momentum is sent" in run.output
    for norms in run.ranks:
        assert norms == pytest.approx([25.0] * len(norms), rel=0.2)


SAVES = """
    weights = nn.Parameter(torch.zeros(64, 64))
    optimizer = torch.optim.AdamW([weights], lr=1e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    noise = torch.Generator().manual_seed(rank)
    for step in range(260):
        optimizer.zero_grad()
        (weights * torch.randn(64, 64, generator=noise) * (1 if step < 60 else 4)).sum().backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % 50 == 0:
            optimizer.state_dict()
    report([optimizer.state[weights]["exp_avg_sq"].mean().item()])
"""


def test_second_moments_follow_although_the_script_saves_often(dadt_run):
    plain, told = (
        dadt_run(SAVES, "--algorithm", "sync", "--compression", name, *OPTIONS).ranks for name in ("none", "momentum:1")
    )
    assert told[0] == told[1]
    assert told[0] == pytest.approx(plain[0], rel=0.25)


LEAVES = """
    import gc, weakref
    model = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": each.parameters()} for each in model], lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for step in range(80):
        optimizer.zero_grad()
        sum(each(torch.ones(4, 32)).pow(2).mean() for each in model).backward()
        optimizer.step()
        schedule.step()
        if step == 60:
            model[1].requires_grad_(False)
        if step == 65:
            for p in optimizer.param_groups.pop()["params"]:
                del optimizer.state[p]
            gone, schedule, p = weakref.ref(model[1].weight), torch.optim.lr_scheduler.ConstantLR(optimizer), None
            del model[1]
    gc.collect()
    report({"weights": model[0].weight.detach(), "gone": torch.tensor(gone() is None)})
"""


def test_layers_that_were_frozen_and_leave_the_optimizer_are_freed(dadt_run):
    run = dadt_run(LEAVES, "--algorithm", "sync", "--compression", "momentum:1", *OPTIONS)
    assert "from now on momentum is sent" in run.output
    assert_equal(*run.ranks)
    assert run.ranks[0]["gone"]


def test_complex_numbers_send_gradients(dadt_run):
    script = """
    weights = nn.Parameter(torch.zeros(64, 64, dtype=torch.complex64))
    optimizer = torch.optim.SGD([weights], lr=0.01, momentum=0.9)
    for step in range(30):
        optimizer.zero_grad()
        (weights - (1 + 2j)).abs().square().sum().backward()
        optimizer.step()
    report({"weights": torch.view_as_real(weights.detach())})
    """
    run = dadt_run(script, "--algorithm", "sync", "--compression", "momentum:1", *OPTIONS)
    assert "gradients are sent in 4 bits, as with int4, since SGD trains complex numbers" in run.output
    assert_equal(*run.ranks)


SAVED_BY_ONE = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    body, heads = nn.Linear(8, 16), nn.ModuleList(nn.Linear(16, 4) for _ in range(2))
    optimizer = torch.optim.AdamW([*body.parameters(), *heads.parameters()], lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
    data = torch.Generator().manual_seed(rank)
    for step in range(75):
        optimizer.zero_grad()
        features = torch.relu(body(torch.randn(16, 8, generator=data)))
        sum(head(features).pow(2).mean() for head in (heads if step < 40 else [heads[step % 3 // 2]])).backward()
        optimizer.step()
        schedule.step()
        if rank == 0:
            optimizer.state_dict()
    report({"state": heads.state_dict()})
"""


def test_one_rank_may_save_while_parameters_become_idle(dadt_run):
    """It has the averages of the exchange under way earlier than the others."""
    run = dadt_run(SAVED_BY_ONE, "--algorithm", "pipe", "--compression", "momentum:1", *OPTIONS)
    assert "from now on momentum is sent" in run.output
    assert_equal(*(rank["state"] for rank in run.ranks))


def test_averages_that_are_not_delivered_yet_are_held_as_copies():
    unseen = UnseenWeights()
    parameters, means = [torch.zeros(3), torch.zeros(2)], [torch.ones(3), torch.ones(2)]
    unseen.masks = {parameters[0]: torch.tensor([True, False, True])}
    held = unseen.held(dict(zip(parameters, means, strict=True)))
    assert held[parameters[0]].tolist() == [0, 1, 0] and held[parameters[1]] is means[1]
    assert means[0].tolist() == [1, 1, 1]  # the rank that saves alone delivers it later
