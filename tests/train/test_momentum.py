"""Trainings that send momentum in one or two bits: near to those without compression, and the same on all ranks."""

from __future__ import annotations

import re

import pytest
import torch
from harness.checks import assert_equal
from harness.job import joined

TRAIN = """
    from harness.scenarios import snapshot
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8))
    optimizer = torch.optim.{optimizer}
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)
    right = torch.randn(64, 8, generator=torch.Generator().manual_seed(7))
    data, losses = torch.Generator().manual_seed(rank), []
    for step in range(120):
        x = torch.randn(16, 64, generator=data)
        loss = nn.functional.cross_entropy(model(x), (x @ right).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    report({{"state": snapshot(model, optimizer), "loss": sum(losses[-10:]) / 10, "first": losses[0]}})
"""
OPTIMIZERS = {
    "adam": "Adam(model.parameters(), lr=4e-3, weight_decay=0.01)",
    "adamw": "AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))",
    "fused": "AdamW(model.parameters(), lr=4e-3, fused=True)",
    "foreach": "Adam(model.parameters(), lr=4e-3, foreach=True)",
    "nadam": "NAdam(model.parameters(), lr=4e-3)",
    "radam": "RAdam(model.parameters(), lr=0.04)",
    "adamax": "Adamax(model.parameters(), lr=8e-3, weight_decay=0.01)",
    "sgd": "SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)",
}
SUITED = ("adam", "fused", "nadam", "adamax", "sgd"), ("adamw", "foreach", "radam", "adamax", "sgd")
"""Each trains by one of the algorithms, and by both in `make test-slow`."""
LEAST = {"momentum:1": 14.0, "momentum:2": 10.0}
"""Times fewer bytes, of all steps: the first tenth sends four bits."""


@pytest.mark.parametrize(
    ("algorithm", "compression", "optimizers"),
    [
        ("sync", "momentum:1", SUITED[0]),
        ("pipe", "momentum:2", SUITED[1]),
        *(
            pytest.param(algorithm, f"momentum:{bits}", tuple(OPTIMIZERS), marks=pytest.mark.slow)
            for algorithm in ("pipe", "sync")
            for bits in (1, 2)
        ),
    ],
)
def test_trainings_learn_and_replicas_are_identical(algorithm, compression, optimizers, dadt_run):
    executor = "gloo" if algorithm == "sync" else "shm"
    options = ["--algorithm", algorithm, "--executor", executor, "--warmup-steps", "4"]
    script = joined(**{name: TRAIN.format(optimizer=OPTIMIZERS[name]) for name in optimizers})
    run = dadt_run(script, *options, "--compression", compression)
    assert "from now on momentum is sent" in run.output
    less = float(re.search(r"sent .* MB per step, (\d+\.\d)x less than uncompressed", run.output)[1])
    assert less >= LEAST[compression], run.output
    for name in optimizers:
        found = run.of(name).ranks
        assert_equal(*(each["state"] for each in found), name)
        for each in found:
            assert each["loss"] < 0.55 * each["first"], (name, each["loss"], each["first"])


GOES_ON = """
    from harness.scenarios import snapshot
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    right = torch.randn(64, 8, generator=torch.Generator().manual_seed(7))
    begin = {begin}
    if begin:
        saved = torch.load("{path}", weights_only=True)
        for each, state in zip((model, optimizer, schedule), saved):
            each.load_state_dict(state)
    for step in range(begin, 60):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = nn.functional.cross_entropy(model(x), (x @ right).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step == 32 and not begin:
            torch.save([each.state_dict() for each in (model, optimizer, schedule)], "{path}")
    report(snapshot(model, optimizer))
"""


@pytest.mark.parametrize("algorithm", ["pipe", pytest.param("sync", marks=pytest.mark.slow)])
def test_a_training_goes_on_bit_for_bit(algorithm, dadt_run, tmp_path):
    options = ["--algorithm", algorithm, "--executor", "shm", "--warmup-steps", "4", "--compression", "momentum:1"]
    whole, resumed = (dadt_run(GOES_ON.format(begin=begin, path=tmp_path / "saved.pt"), *options) for begin in (0, 33))
    assert "from now on momentum is sent" in whole.output
    assert "from now on momentum is sent" not in resumed.output
    for found in (whole.ranks[1], *resumed.ranks):
        assert_equal(whole.ranks[0], found)


@pytest.mark.parametrize("optimizer", ["Adam(model.parameters(), lr=4e-3)", "AdamW(model.parameters(), fused=True)"])
def test_infinity_on_one_rank_makes_all_skip_and_no_more(optimizer, dadt_run):
    run = dadt_run(
        f"""
        from harness.scenarios import batch, mlp, snapshot
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.{optimizer}
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
        scales, weights = [], []
        for step in range(40):
            x, y = batch(rank, step, 0)
            loss = nn.functional.cross_entropy(model(x), y)
            if rank == 1 and step in (9, 25):
                loss = loss * float("inf")
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            scales.append(scaler.get_scale())
            weights.append(model[0].weight.detach().clone())
        report({{"state": snapshot(model, optimizer), "scales": scales, "weights": weights}})
        """,
        *("--algorithm", "sync", "--warmup-steps", "4", "--compression", "momentum:1", "--executor", "gloo"),
    )
    assert "from now on momentum is sent" in run.output
    first, second = run.ranks
    assert_equal(first["state"], second["state"])
    assert first["scales"] == second["scales"]
    for skipped in (9, 25):
        assert first["scales"][skipped] == first["scales"][skipped - 1] / 2
        assert torch.equal(first["weights"][skipped], first["weights"][skipped - 1])
        assert not torch.equal(first["weights"][skipped + 1], first["weights"][skipped])
    assert all(value.isfinite().all() for value in first["state"].values())


@pytest.mark.parametrize(
    "optimizer", ["Adam(model.parameters(), amsgrad=True)", "Adamax(model.parameters(), betas=(0, 0.99))"]
)
def test_an_optimizer_that_does_not_suit_sends_gradients(optimizer, dadt_run):
    run = dadt_run(TRAIN.format(optimizer=optimizer), "--algorithm", "sync", "--compression", "momentum:1")
    assert re.search(r"--compression momentum:1: gradients are sent in 4 bits, as with int4, since .*Ada", run.output)
    less = float(re.search(r"sent .* MB per step, (\d+\.\d)x less than uncompressed", run.output)[1])
    assert 6 < less < 8


def test_v_follows_what_gradients_become(dadt_run):
    """First they are the same on both ranks, so that averages are as large as they, and then noise alone."""
    run = dadt_run(
        """
        weights = nn.Parameter(torch.zeros(50, 50))
        optimizer = torch.optim.Adam([weights], lr=1e-6, betas=(0.9, 0.9))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
        seen = []
        for step in range(201):
            seed = step if step < 100 else 1000 * (rank + 1) + step
            gradient = torch.randn(50, 50, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            (weights * gradient).sum().backward()
            optimizer.step()
            schedule.step()
            seen.append(optimizer.state[weights]["exp_avg_sq"].mean().item())
        report([seen[99], seen[-1]])
        """,
        *("--algorithm", "sync", "--warmup-steps", "4", "--compression", "momentum:1", "--executor", "shm"),
    )
    assert "from now on momentum is sent" in run.output
    for alike, noise in run.ranks:
        assert alike == pytest.approx(1.0, rel=0.15)
        assert noise == pytest.approx(0.5, rel=0.15)


def test_v_is_not_smaller_where_a_rank_has_only_just_begun_to_sample(dadt_run):
    """As a rank does that joined a short time before: its samples are 0 for the steps before."""
    run = dadt_run(
        """
        import gc
        (runtime,) = [o for o in gc.get_objects() if type(o).__name__ == "Runtime"]
        weights = nn.Parameter(torch.zeros(50, 50))
        optimizer = torch.optim.Adam([weights], lr=1e-6, betas=(0.9, 0.9))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
        for step in range(151):
            if step == 148 and rank == 1:
                next(iter(runtime.attachments)).momentum.join({}, None)
            gradient = torch.randn(50, 50, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            (weights * gradient).sum().backward()
            optimizer.step()
            schedule.step()
        report(optimizer.state[weights]["exp_avg_sq"].mean().item())
        """,
        *("--algorithm", "sync", "--warmup-steps", "4", "--compression", "momentum:1", "--executor", "shm"),
    )
    assert "from now on momentum is sent" in run.output
    assert run.ranks == [pytest.approx(1.0, rel=0.15)] * 2


CLIPS = """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    right = torch.randn(64, 8, generator=torch.Generator().manual_seed(7))
    data, seen = torch.Generator().manual_seed(rank), []
    for step in range(100):
        x = torch.randn(16, 64, generator=data)
        loss = nn.functional.cross_entropy(model(x), (x @ right).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        seen.append((float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)), loss.item()))
        optimizer.step()
        schedule.step()
    norms, losses = (sum(each) / 50 for each in zip(*seen[50:]))
    report({"norm": norms, "loss": losses})
"""


@pytest.mark.parametrize("algorithm", ["sync", pytest.param("pipe", marks=pytest.mark.slow)])
def test_a_script_clips_what_it_would_clip_without_compression(algorithm, dadt_run):
    options = ["--algorithm", algorithm, "--executor", "shm", "--warmup-steps", "4"]
    plain, sent = (dadt_run(CLIPS, *options, "--compression", name).ranks for name in ("none", "momentum:1"))
    for want, found in zip(plain, sent, strict=True):
        assert found["norm"] == pytest.approx(want["norm"], rel=0.2)
        assert found["loss"] == pytest.approx(want["loss"], rel=0.2)
