"""Trainings whose gradients are compressed: near to those without, and the same on all ranks."""

from __future__ import annotations

import re
import subprocess

import pytest
import torch
from harness import SCRIPTS
from harness.checks import assert_equal
from harness.job import joined, starter
from harness.patience import PATIENCE
from harness.scenarios import WARMUP, simulate

DIGITS = SCRIPTS / "digits.py"
NEAR = {"bf16": 0.01, "fp16": 0.01, "int8": 0.05, "int4": 0.3, "powersgd:2": 0.15}
"""Weights after 24 steps; of the last, after steps with matrices of 3 and 6 columns."""
LEAST = {"bf16": 1.9, "fp16": 1.9, "int8": 2.5, "int4": 3.5, "powersgd:2": 1.1}
"""Times fewer bytes."""
LEAST_OF_16_BITS = {"int8": 1.8, "int4": 2.5, "powersgd:2": 1.2}
NAMES = ("accumulate", "unused", "clip", "frozen")
TRAIN = f"""
    from harness import scenarios
    report({{name: scenarios.train(name, rank) for name in {NAMES!r}}})
"""


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Of all weights together, relative to them."""
    weights = [name for name in a if not name.startswith("optimizer")]
    difference = torch.cat([(a[n] - b[n]).flatten() for n in weights]).norm()
    return float(difference / torch.cat([b[n].flatten() for n in weights]).norm())


@pytest.mark.parametrize(
    ("algorithm", "compression"),
    [
        ("sync", "bf16"),
        ("sync", "powersgd:2"),
        ("pipe", "int8"),
        ("pipe", "int4"),
        pytest.param("sync", "fp16", marks=pytest.mark.slow),
        pytest.param("sync", "int8", marks=pytest.mark.slow),
        pytest.param("pipe", "powersgd:2", marks=pytest.mark.slow),
    ],
)
def test_trainings_stay_near_and_replicas_identical(algorithm, compression, dadt_run):
    executor = "gloo" if algorithm == "sync" else "shm"
    options = ["--algorithm", algorithm, "--executor", executor, "--warmup-steps", str(WARMUP)]
    run = dadt_run(TRAIN, *options, "--compression", compression)
    less = float(re.search(r"sent .* MB per step, (\d+\.\d)x less than uncompressed", run.output)[1])
    assert less >= LEAST[compression], run.output
    for name in NAMES:
        mine = [ranks[name] for ranks in run.ranks]
        assert_equal(*mine, name)
        want = simulate(name, 2, algorithm)
        assert mine[0].keys() == want.keys()
        far = distance(mine[0], want)
        assert far < NEAR[compression], (name, far)
        # Branches' matrices of 3 x 6 are no larger than two of rank 2.
        assert far > 0 or (name, compression) == ("unused", "powersgd:2"), "nothing was compressed"


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["int8", pytest.param("powersgd:2", marks=pytest.mark.slow)])
def test_a_model_of_16_bits(compression, dadt_run):
    run = dadt_run(
        """
        from harness.scenarios import snapshot
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).bfloat16()
        right = torch.randn(16, 4, generator=torch.Generator().manual_seed(7))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        data, losses = torch.Generator().manual_seed(rank), []
        for step in range(60):
            x = torch.randn(32, 16, generator=data)
            loss = nn.functional.cross_entropy(model(x.bfloat16()).float(), (x @ right).argmax(1))
            optimizer.zero_grad()
            loss.backward()
            assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
            optimizer.step()
            losses.append(loss.item())
        report({"state": snapshot(model, optimizer), "losses": losses})
        """,
        *("--algorithm", "pipe", "--executor", "gloo", "--warmup-steps", "6", "--compression", compression),
    )
    assert_equal(*(found["state"] for found in run.ranks))
    for found in run.ranks:
        assert sum(found["losses"][-5:]) < 0.5 * sum(found["losses"][:5]), found["losses"]
    less = float(re.search(r"sent .* MB per step, (\d+\.\d)x less than uncompressed", run.output)[1])
    assert less >= LEAST_OF_16_BITS[compression], run.output


@pytest.mark.parametrize("compression", [pytest.param("int8", marks=pytest.mark.slow), "powersgd:2"])
def test_infinity_on_one_rank_makes_all_skip_and_no_more(compression, dadt_run):
    run = dadt_run(
        """
        from harness.scenarios import batch, mlp, snapshot
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
        scales, weights = [], []
        for step in range(24):
            x, y = batch(rank, step, 0)
            loss = nn.functional.cross_entropy(model(x), y)
            if rank == 1 and step in (9, 15):
                loss = loss * float("inf")
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            weights.append(model[0].weight.detach().clone())
        report({"state": snapshot(model, optimizer), "scales": scales, "weights": weights})
        """,
        *("--algorithm", "sync", "--warmup-steps", "4", "--compression", compression, "--executor", "gloo"),
    )
    first, second = run.ranks
    assert_equal(first["state"], second["state"])
    assert first["scales"] == second["scales"]
    assert first["scales"][9] == first["scales"][8] / 2
    for skipped in (9, 15):
        assert torch.equal(first["weights"][skipped], first["weights"][skipped - 1])
        assert not torch.equal(first["weights"][skipped + 1], first["weights"][skipped])
    assert all(value.isfinite().all() for value in first["state"].values())


LOST_AT_FIRST = """
    gradient = torch.full((512,), 1e-3)
    gradient[::256] = 1.0
    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(512))
            self.register_buffer("mean", torch.zeros(4))
        def forward(self, x):
            if {reassigns}:
                self.mean = 0.9 * self.mean + 1.0
            return (self.weight * x).sum()
    model = nn.ModuleList(Seen() for _ in range(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(100):
        optimizer.zero_grad()
        sum(part(gradient) for i, part in enumerate(model) if (step + i) % {every} == 0).backward()
        if {by_hand}:
            for p in model.parameters():
                p.grad.mul_(1.0)
        optimizer.step()
    report({every} * torch.stack([p.detach()[1:256] for p in model.parameters()]))
"""


def test_what_compression_loses_comes_with_later_steps(dadt_run):
    """Also where the script changes gradients by hand, with several buckets launched before that, and where a forward
    puts new tensors into the place of its buffers, and of parameters that are trained in turn. Beside 1.0 one rounding
    makes 0.001 zero."""
    script = joined(
        by_hand=LOST_AT_FIRST.format(by_hand=True, reassigns=False, every=1),
        reassigned=LOST_AT_FIRST.format(by_hand=False, reassigns=True, every=1),
        in_turn=LOST_AT_FIRST.format(by_hand=False, reassigns=False, every=2),
    )
    run = dadt_run(
        script, *("--algorithm", "sync", "--compression", "int8", "--executor", "shm", "--bucket-mb", "0.002")
    )
    for part in ("by_hand", "reassigned", "in_turn"):
        weights = run.of(part).ranks
        assert torch.equal(*weights), part
        assert weights[0].max() < -0.06, f"{part}: of -0.1"


def test_what_a_closure_gives_is_not_compressed(dadt_run):
    script = """
        from harness.scenarios import batch, mlp, snapshot
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, line_search_fn="strong_wolfe")
        for step in range(4):
            x, y = batch(rank, step, 0)
            def closure():
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                return loss
            optimizer.step(closure)
        report(snapshot(model))
    """
    run = dadt_run(script, "--compression", "int8")
    assert_equal(*run.ranks)
    assert "4 steps, none delayed" in run.output and "less than uncompressed" not in run.output


@pytest.mark.slow
@pytest.mark.timeout(660)
@pytest.mark.parametrize("compression", ["bf16", "fp16", "int8", "int4", "powersgd:4"])
def test_the_digits(compression, tmp_path):
    def accuracy(name: str) -> float:
        options = ["--batch", "global", "--algorithm", "sync", "--warmup-steps", "40", "--compression", name]
        done = subprocess.run(
            [
                *starter("dadt run", 2),
                "--log-dir",
                str(tmp_path),
                *options,
                str(DIGITS),
            ],
            capture_output=True,
            text=True,
            timeout=5 * PATIENCE,
        )
        found = re.findall(r"accuracy (0\.\d+)", done.stdout + done.stderr)
        assert len(found) == 2 and len(set(found)) == 1, done.stdout + done.stderr
        return float(found[0])

    assert accuracy(compression) > accuracy("none") - 0.005


DEFAULTS = """
    import os
    torch.manual_seed(0)
    model = nn.Linear(300, 300)
    generator = torch.Generator().manual_seed(rank)
    if "PLAIN" not in os.environ:
        torch.set_default_dtype(torch.{dtype})
        torch.set_default_device("meta")    # stands for a GPU
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(12):
        optimizer.zero_grad()
        model(torch.randn(4, 300, generator=generator, dtype=torch.float32, device="cpu")).square().mean().backward()
        optimizer.step()
    report(dict(model.state_dict()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compression", "dtype"), [("int8", "bfloat16"), pytest.param("powersgd:2", "float64", marks=pytest.mark.slow)]
)
def test_the_scripts_default_dtype_and_device_are_its_own(compression, dtype, dadt_run):
    options = ["--warmup-steps", "4", "--compression", compression]
    run = dadt_run(DEFAULTS.format(dtype=dtype), *options)
    assert_equal(*run.ranks, "replicas")
    plain = dadt_run(DEFAULTS.format(dtype=dtype), *options, "-x", "PLAIN=1")
    assert_equal(run.ranks[0], plain.ranks[0], "with other defaults")
