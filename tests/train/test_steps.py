"""Steps that are not one forward, one backward, one step."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from harness.checks import assert_equal, assert_replicas_equal
from harness.job import Run, joined

WARMUP = 5

DELAY = """
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []
    for step in range(12):
        x = torch.tensor([[float((rank + 1) * (step + 1))]])
        model(x).sum().backward()
        seen_in_step = []
        handle = optimizer.register_step_pre_hook(
            lambda o, a, k: seen_in_step.append(None if model.weight.grad is None else float(model.weight.grad)))
        optimizer.step()
        handle.remove()
        seen += seen_in_step
        optimizer.zero_grad()
    report({"seen": seen, "state": dict(model.state_dict())})
"""


SCALER = """
    from harness.scenarios import batch, mlp, snapshot
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    scales, steps, weights = [], 0, []
    for step in range(24):
        x, y = batch(rank, step, 0)
        loss = nn.functional.cross_entropy(model(x), y)
        if step == 12 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if {clip}:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    assert all(p.isfinite().all() for p in model.parameters())
    report({{"state": snapshot(model, optimizer), "scales": scales}})
"""


CLOSURE = """
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(7)
    X = torch.randn(16, 4, generator=generator, dtype=torch.float64)
    Y = torch.randn(16, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(4, 1).double()
    if world == 1 or rank == 0:
        with torch.no_grad():
            model.weight.fill_(0.5); model.bias.fill_(0.1)
    X, Y = (X.chunk(world)[rank], Y.chunk(world)[rank])
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, line_search_fn="strong_wolfe", max_iter=8)
    losses = []
    for step in range(3):
        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(X), Y)
            loss.backward()
            return loss
        losses.append(optimizer.step(closure).item())
    report({"state": {**model.state_dict(), "losses": torch.tensor(losses, dtype=torch.float64)}})
"""


def alone(script: str) -> dict[str, Any]:
    """What a script finds in one process without DADT."""
    found: dict[str, Any] = {}
    exec(textwrap.dedent(script), {"torch": torch, "nn": torch.nn, "rank": 0, "world": 1, "report": found.update})
    return found


def test_a_closure_equals_one_process(dadt_run) -> None:
    two = dadt_run(CLOSURE)
    assert_replicas_equal(two)
    for name, value in alone(CLOSURE)["state"].items():
        assert torch.allclose(value, two.ranks[0]["state"][name], rtol=0, atol=1e-10), name


GAN = """
    from harness.scenarios import batch, snapshot
    torch.manual_seed(rank)
    G, D = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6)), nn.Linear(6, 1)
    g = torch.optim.Adam(G.parameters(), lr=0.01, betas=(0.5, 0.9))
    d = torch.optim.Adam(D.parameters(), lr=0.01, betas=(0.5, 0.9))
    criterion = nn.BCEWithLogitsLoss()
    for step in range(30):
        real, _ = batch(rank, step, 0)
        noise = torch.randn(4, 2)
        d.zero_grad()
        fake = G(noise)
        loss = criterion(D(real), torch.ones(4, 1)) + criterion(D(fake.detach()), torch.zeros(4, 1))
        loss.backward()
        d.step()
        g.zero_grad()
        criterion(D(fake), torch.ones(4, 1)).backward()
        g.step()
    G.eval()
    report({"state": {**snapshot(G, g), **{"d." + k: v for k, v in snapshot(D, d).items()}}})
"""


SUPER = """
    from harness.scenarios import backward, SCENARIOS, mlp, snapshot
    Adamax = torch.optim.Adamax  # as little is known of its step as of those that override it
    class Twice(Adamax):
        def step(self, closure=None):
            return super().step(closure)
    class Around(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__(inner.param_groups[0]["params"], {})
            self.param_groups, self.state = inner.param_groups, inner.state
        def step(self, closure=None):
            return self.inner.step(closure)
    found = {}
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)   # hooks the base class
    for kind in ("plain", "super", "around"):
        torch.manual_seed(0)
        model = mlp()
        make = {"plain": Adamax, "super": Twice, "around": Adamax}[kind]
        optimizer = make(model.parameters(), lr=0.05)
        if kind == "around":
            optimizer = Around(optimizer)
        for step in range(12):
            backward(SCENARIOS["momentum"], model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        found[kind] = {k: v.clone() for k, v in model.state_dict().items()}
    report(found)
"""


LATE_BACKWARD = """
    from harness.scenarios import backward, SCENARIOS, mlp
    model = mlp(); optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(8):
        backward(SCENARIOS["momentum"], model, rank, step)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        backward(SCENARIOS["momentum"], model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_backward_after_clipping_is_refused(dadt_run) -> None:
    run = dadt_run(LATE_BACKWARD, code=None)
    assert run.code == 1
    assert "clip once, after the step's last backward" in run.output


CHANGING = """
    from harness.scenarios import backward, SCENARIOS, mlp, snapshot, batch
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(20):
        parts = [1, 1, 1, 1, 2, 2, 2, 1, 3, 1, 1, 1, 1, 2, 1, 1, 1, 2, 2, 2][step]
        for part in range(parts):
            x, y = zip(*[batch(r, step, part) for r in (range(2) if world == 1 else [rank])])
            (nn.functional.cross_entropy(model(torch.cat(x).double()), torch.cat(y)) / parts).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 3 > 0)
    report({"state": snapshot(model, optimizer)})
"""


def test_sync_overlapped_equals_the_joined_batch(dadt_run) -> None:
    """With small buckets, most leave from backward; the number of backwards changes, so some leave too early."""
    two = dadt_run(CHANGING, "--algorithm", "sync", "--bucket-mb", "0.01")
    assert_replicas_equal(two)
    for name, value in alone(CHANGING)["state"].items():
        assert torch.allclose(value, two.ranks[0]["state"][name], rtol=0, atol=1e-10), name


LATE = """
    import io
    from harness.scenarios import batch, mlp, snapshot
    def unpickled():
        stream = io.BytesIO(); torch.save(mlp(), stream); stream.seek(0)
        return torch.load(stream, weights_only=False)
    found = {}
    models = []
    def add(make):
        torch.manual_seed(rank)                  # each rank builds other weights
        models.append((model := make(), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)))
    add(mlp)
    predicted = 0
    for step in range(30):
        if step == 10:
            add(unpickled)                       # when the first has long begun
        for model, optimizer in models:
            true = [p.detach().clone() for p in model.parameters()]
            x, y = batch(rank, step, 0)
            nn.functional.cross_entropy(model(x), y).backward()
            predicted += any(not torch.equal(p, t) for p, t in zip(model.parameters(), true))
            optimizer.step()
            optimizer.zero_grad()
    assert predicted >= 40 - 2, predicted
    report({"state": {f"{i}{k}": v for i, m in enumerate(models) for k, v in snapshot(*m).items()}})
"""


PARTS = """
    import gc
    torch.manual_seed(rank)
    def part():
        made = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        made[0].requires_grad_(False)
        return made
    parts = [part()]
    if rank == 1:
        gc.collect()  # the order in which Python knows its objects is another one now
    parts.append(part())
    optimizer = torch.optim.SGD([p for each in parts for p in each.parameters()], lr=0.1)
    for step in range(8):
        x = torch.randn(5, 6)
        optimizer.zero_grad()
        sum(each(x).tanh().mean() for each in parts).backward()
        optimizer.step()
    report({"state": {f"{i}.{k}": v.clone() for i, each in enumerate(parts) for k, v in each.state_dict().items()}})
"""


@pytest.fixture(scope="module")
def pipe(shared_run) -> Run:
    scripts = {"delay": DELAY, "super": SUPER, "late": LATE, "parts": PARTS}
    return shared_run(joined(**EITHER, **scripts), "--warmup-steps", str(WARMUP))


@pytest.fixture(scope="module")
def sync(shared_run) -> Run:
    return shared_run(joined(**EITHER), "--algorithm", "sync")


EITHER = {"clipped": SCALER.format(clip=True), "scaled": SCALER.format(clip=False), "gan": GAN}
STEPS = {"scaled": 24, "clipped": 24, "gan": 2 * 30, "delay": 12, "super": 3 * 12, "late": 30 + 20, "parts": 8}
OPTIMIZERS = {"scaled": 1, "clipped": 1, "gan": 2, "delay": 1, "super": 3, "late": 2, "parts": 1}


def assert_the_delay_is_one_step(run: Run, warmup: int) -> None:
    mean = [1.5 * (t + 1) for t in range(12)]
    expected = [*mean[:warmup], None, *mean[warmup:-1]]
    assert [r["seen"] for r in run.ranks] == [expected, expected]


def test_the_delay_is_one_step(pipe) -> None:
    assert_the_delay_is_one_step(pipe.of("delay"), WARMUP)


@pytest.mark.slow
def test_the_delay_is_one_step_without_warm_up(dadt_run) -> None:
    run = dadt_run(DELAY, "--warmup-steps", "0")
    assert_the_delay_is_one_step(run, 0)
    assert "12 steps, 12 of them delayed by one" in run.output


def test_each_step_is_counted_once(pipe) -> None:
    """Of wrappers and of what comes late, too; the two that an infinity leaves out are none, but were delayed."""
    taken = sum(STEPS.values())
    delayed = taken - WARMUP * sum(OPTIMIZERS.values())
    assert f" {taken - 2} steps, {delayed} of them delayed by one" in pipe.output


@pytest.mark.parametrize("algorithm", ["pipe", "sync"])
@pytest.mark.parametrize("script", ["clipped", "scaled"])
def test_an_infinity_on_one_rank_is_skipped_by_all(pipe, sync, algorithm, script) -> None:
    run = {"pipe": pipe, "sync": sync}[algorithm].of(script)
    assert_replicas_equal(run)
    assert run.ranks[0]["scales"] == run.ranks[1]["scales"]
    drops = [t for t, (a, b) in enumerate(zip(run.ranks[0]["scales"], run.ranks[0]["scales"][1:])) if b < a]
    # The average with the infinity arrives one step later under pipe; drops[i] is the step before.
    assert drops[0] == (12 if algorithm == "pipe" else 11)


@pytest.mark.parametrize("algorithm", ["pipe", "sync"])
def test_two_optimizers(pipe, sync, algorithm) -> None:
    assert_replicas_equal({"pipe": pipe, "sync": sync}[algorithm].of("gan"))


def test_a_step_inside_a_step_is_one(pipe) -> None:
    run = pipe.of("super")
    for kind in ("plain", "super", "around"):
        for rank in run.ranks:
            assert_equal(rank[kind], run.ranks[0]["plain"], kind)


def test_optimizers_and_models_that_come_late(pipe) -> None:
    assert_replicas_equal(pipe.of("late"))


def test_modules_beside_each_other_are_in_one_order_on_all_ranks(pipe) -> None:
    assert_replicas_equal(pipe.of("parts"))


ADDED_UP = """
    from torch.utils.data import DataLoader, TensorDataset
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    means = []
    for _ in range(6):
        optimizer.zero_grad()
        for (batch,) in DataLoader(TensorDataset(torch.ones(17, 1)), batch_size=4, shuffle=True):
            ((rank + 1) * model(batch).mean()).backward()
        optimizer.step()
        means.append((model[1].weight.grad / model[0].weight.detach() / 3).item())
    report({"state": model.state_dict(), "means": means})
"""


@pytest.mark.parametrize("size", ["25", "0.000004"])
def test_all_batches_that_add_up_weigh(dadt_run, size: str) -> None:
    """Also where the first bucket goes before the step: rank 0 has 9 samples of 12, rank 1 has 8."""
    run = dadt_run(ADDED_UP, "--algorithm", "sync", "--bucket-mb", size)
    assert_replicas_equal(run)
    assert run.ranks[0]["means"] == pytest.approx([(9 + 2 * 8) / 17] * 6)
