"""Late gradients that blow up send all ranks back to synchronous steps; those of a healthy training never do."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from harness import ROOT, SCRIPTS
from harness.checks import assert_replicas_equal
from harness.job import Run, joined
from harness.patience import PATIENCE

from dadt.algorithms.pipe.divergence import PATIENCE as STEPS
from dadt.algorithms.pipe.divergence import Divergence

BACK = "back to synchronous steps on all ranks"

VALLEY = """
    class Valley(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(20) + rank)
        def forward(self, target):
            return 0.5 * ((self.w - target) ** 2 * torch.linspace(0.5, 1.0, 20)).sum()
    model = Valley()
    # Stable below 1.23 when late by one and predicted, below 3.8 when synchronous.
    optimizer = torch.optim.SGD(model.parameters(), lr=2.5, momentum=0.9)
    largest, steps = 0.0, 350
    for step in range(steps):
        optimizer.zero_grad()
        model(float(rank)).backward()
        optimizer.step()
        largest = max(largest, model.state_dict()["w"].abs().max().item())
        if not largest < 1e20:
            break
    report({"state": {"w": model.state_dict()["w"].clone()}, "largest": largest, "step": step})
"""


def test_a_rate_that_only_sync_bears(dadt_run) -> None:
    run = dadt_run(VALLEY, "--warmup-steps", "25")
    assert run.output.count(BACK) == 1
    assert "warning: step " in run.output and "Lower the learning rate or raise --warmup-steps" in run.output
    assert_replicas_equal(run)
    for rank in run.ranks:
        assert rank["largest"] > 30  # it was on its way out
        assert (rank["state"]["w"] - 0.5).abs().max() < 1e-3  # the mean of both ranks' targets
    assert "none delayed" not in run.output


def test_no_fall_back(dadt_run) -> None:
    run = dadt_run(VALLEY, "--warmup-steps", "25", "--no-fall-back")
    assert BACK not in run.output
    assert all(rank["largest"] > 1e20 for rank in run.ranks)


RESTORED = """
    import copy
    class Valley(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(20))
        def forward(self, target):
            seen.append(self.w.detach().clone())
            return 0.5 * ((self.w - target) ** 2).sum()
    model, seen, off = Valley(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=2.5, momentum=0.9)
    for step in range(300):
        if step == 30:
            kept = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        if step == 250:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        true = model.state_dict()["w"].clone()
        optimizer.zero_grad()
        model(float(rank)).backward()
        optimizer.step()
        if step >= 250:
            off.append((seen[-1] - true).abs().max().item())
    report({"state": {"w": model.state_dict()["w"].clone()}, "off": off})
"""


def test_weights_of_before_the_fall_back_go_on_synchronously(dadt_run) -> None:
    """Going back to the last good state takes neither the gradient in flight nor the prediction of then."""
    run = dadt_run(RESTORED, "--warmup-steps", "25")
    assert run.output.count(BACK) == 1
    assert_replicas_equal(run)
    for rank in run.ranks:
        assert len(rank["off"]) == 50 and max(rank["off"]) == 0


DROPPED = """
    import gc
    class Trainer:
        def __init__(self):
            self.model = nn.Linear(16, 16)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.optimizer.trainer = self  # a cycle, which Python takes away when it likes
        def fit(self):
            for _ in range(3):
                self.optimizer.zero_grad()
                self.model(torch.randn(8, 16)).pow(2).mean().backward()
                self.optimizer.step()
    gc.disable()
    shown = sum(p.numel() for p in Trainer().model.parameters())
    if rank == 1:
        gc.collect()
    trainer = Trainer()
    trainer.fit()
    gc.enable()
    report({"state": trainer.model.state_dict()})
"""
DECAYED = """
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.9)
    norms = []
    for step in range(24):
        norms.append(float(model.state_dict()["weight"].norm()))
        optimizer.zero_grad()
        model(torch.randn(4, 8)).pow(2).mean().backward()
        model.weight.data.mul_(0.95)
        optimizer.step()
    report({"state": {name: value.clone() for name, value in model.state_dict().items()}, "norms": norms})
"""
SHOWN = """
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shadow = {name: p.data.clone() for name, p in model.named_parameters()}
    off = []
    for step in range(40):
        model(torch.randn(4, 8)).pow(2).mean().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
            for name, p in model.named_parameters():
                shadow[name] = 0.9 * shadow[name] + 0.1 * p.data
        elif step > 20:  # evaluates in the middle of an accumulation
            own, want = {}, {name: value.clone() for name, value in shadow.items()}
            for name, p in model.named_parameters():
                own[name], p.data = p.data, shadow[name]
            model.eval()
            off += [float((p.data - want[name]).abs().max()) for name, p in model.named_parameters()]
            for name, p in model.named_parameters():
                p.data = own[name]
            model.train()
    report({"state": {name: value.clone() for name, value in model.state_dict().items()}, "off": off})
"""
LOGGED = """
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(12):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
        rate = optimizer.state_dict()["param_groups"][0]["lr"]
    report({"state": model.state_dict(), "rate": rate})
"""


def test_what_a_script_does_to_weights_before_a_step_lasts(dadt_run) -> None:
    """A decay by hand, weights of an average that are shown for a while, an optimizer that was only looked at, and one
    whose state is."""
    scripts = {"dropped": DROPPED, "decayed": DECAYED, "shown": SHOWN, "logged": LOGGED}
    run = dadt_run(joined(**scripts), "--warmup-steps", "5")
    for script in scripts:
        assert_replicas_equal(run.of(script))
    assert run.output.count("the script changes weights") == 1
    assert run.output.count("optimizer.state_dict()") == run.output.count("is called in every step") == 1
    for rank in run.of("decayed").ranks:
        last = rank["norms"][10:]
        assert all(abs(after - 0.95 * before) < 1e-4 * before for before, after in pairwise(last)), rank["norms"]
    for rank in run.of("shown").ranks:
        assert len(rank["off"]) == 18 and max(rank["off"]) == 0


LANGUAGE = """
    import gzip, pathlib
    text = torch.tensor(list(gzip.decompress(pathlib.Path({data!r}).read_bytes())[:100_000]))
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.place = nn.Embedding(128, 32), nn.Embedding(32, 32)
            layer = lambda: nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True, norm_first=True)
            self.layers, self.head = nn.ModuleList([layer(), layer()]), nn.Linear(32, 128)
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(32))
        def forward(self, x):
            h = self.embed(x) + self.place(torch.arange(32))
            for layer in self.layers:
                h = layer(h, src_mask=self.mask, is_causal=True)
            return self.head(h)
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    # From nothing up, and suddenly sixfold in the middle, and back.
    rate = lambda step: min(1.0, (step + 1) / 60) * (6.0 if 160 <= step < 200 else 1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    draw = torch.Generator().manual_seed(rank)
    for step in range(240):
        at = torch.randint(0, len(text) - 33, (8,), generator=draw)
        x, y = (torch.stack([text[i + o : i + o + 32] for i in at.tolist()]) for o in (0, 1))
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    report(loss.item())
"""


@pytest.mark.slow
def test_digits_stay_late_at_a_large_rate(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dadt_cli", "run", "-np", "2", "--batch", "global", "--warmup-steps", "40"]
    script = str(SCRIPTS / "digits.py")
    done = subprocess.run(
        [*command, "--log-dir", str(tmp_path), script, "--lr", "0.2", "--seeds", "1", "--steps", "150"],
        capture_output=True,
        timeout=PATIENCE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    output = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, output
    assert BACK not in output
    assert "150 steps, 110 of them delayed by one" in output


SCALED = """
    from harness.scenarios import batch, mlp, snapshot
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)
    for step in range(60):
        x, y = batch(rank, step, 0)
        loss = nn.functional.cross_entropy(model(x), y) * (float("inf") if rank == 1 and 40 <= step < 50 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    report({"state": snapshot(model, optimizer)})
"""


@pytest.fixture(scope="module")
def healthy(shared_run) -> Run:
    data = ROOT / "examples" / "data" / "tinyshakespeare" / "input.txt.gz"
    return shared_run(joined(language=LANGUAGE.format(data=str(data)), scaled=SCALED), "--warmup-steps", "30")


def test_a_language_model_stays_late(healthy) -> None:
    assert BACK not in healthy.output
    assert all(loss < 3.3 for loss in healthy.of("language").ranks)  # 4.85 at first


def test_what_the_gradient_scaler_leaves_out_is_no_divergence(healthy) -> None:
    assert BACK not in healthy.output
    assert_replicas_equal(healthy.of("scaled"))


def test_all_steps_of_healthy_trainings_stay_late(healthy) -> None:
    """240 and 60, without 30 of each; the scaler leaves out ten."""
    assert "290 steps, 240 of them delayed by one" in healthy.lines()[-1]


def seen(*norms: float) -> list[bool]:
    """After thirty steps with norms around 1."""
    divergence = Divergence()
    for i in range(30):
        divergence.learn(1.0 + 0.3 * math.sin(i))
    return [divergence.see(norm) for norm in norms]


def test_some_large_steps_in_a_row_are_a_divergence() -> None:
    assert not any(seen(*[100.0] * (STEPS - 1), 1.0, *[100.0] * (STEPS - 1)))
    assert seen(*[100.0] * STEPS)[-1]
    assert seen(*[math.nan] * STEPS)[-1]
    assert seen(*[math.inf] * STEPS)[-1]


def test_growth_of_two_percent_a_step_is_a_divergence_and_half_a_percent_is_training() -> None:
    assert any(seen(*[1.02**step for step in range(600)]))
    assert not any(seen(*[1.005**step for step in range(2000)]))


def test_the_usual_norm_is_learned_late_where_there_is_no_warm_up() -> None:
    divergence = Divergence()
    assert not any(divergence.see(norm) for norm in [0.0, 50.0, *[1.0] * 40])
    assert divergence.usual == pytest.approx(1.0, rel=0.3)
    assert any(divergence.see(30.0) for _ in range(STEPS))
