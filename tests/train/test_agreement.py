"""Ranks that decide differently end up equal, or with an error that says who and why."""

from __future__ import annotations

import re

import pytest
import torch
from harness.checks import assert_equal, assert_replicas_equal
from harness.job import Run, joined

from dadt.train.exchange.fingerprint import of_trained

PLATEAU = """
    from harness.scenarios import backward, SCENARIOS, mlp, snapshot
    torch.manual_seed(0)
    model = mlp(); optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(24):
        backward(SCENARIOS["adam"], model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(1.0 / (step + 1) if rank == 0 or step % 8 != 7 else 2.0)   # rank 1 sees no progress
    report({"state": snapshot(model, optimizer), "lr": optimizer.param_groups[0]["lr"]})
"""

RESTORED = """
    from harness.scenarios import backward, SCENARIOS, mlp
    torch.manual_seed(0)
    model = mlp(); optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=100)
    used, weights = [], []
    def note(*_):
        used.append({key: value for key, value in optimizer.param_groups[0].items() if key != "params"})
    optimizer.register_step_pre_hook(note)
    for step in range(24):
        if rank == 0 and step == 10:   # as a script that loads its checkpoint on rank 0 alone
            schedule.load_state_dict({**schedule.state_dict(), "last_epoch": 40})
        if rank == 0 and step == 18:
            optimizer.param_groups[0].update(weight_decay=0.3, eps=1e-7)
        backward(SCENARIOS["adam"], model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        weights.append(model[0].weight.detach().clone())
    report({"used": used, "weights": weights})
"""

SKIP = """
    from harness.scenarios import mlp
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    model = mlp(); optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(4):
        for step, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            if not (rank == 1 and epoch == 1 and step == 3):
                optimizer.step()
"""


@pytest.mark.parametrize("algorithm", ["pipe", "sync"])
def test_a_rank_that_skips_a_step(dadt_run, algorithm) -> None:
    run = dadt_run(SKIP, "--warmup-steps", "4", "--algorithm", algorithm, code=None)
    assert run.code == 1
    assert "skipped a step" in run.output


EARLY = """
    from harness.scenarios import backward, SCENARIOS, mlp
    model = mlp(); optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(20 if rank == 0 else 12):
        backward(SCENARIOS["momentum"], model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("executor", ["shm", "tcp"])
def test_a_rank_that_ends_early(dadt_run, executor) -> None:
    run = dadt_run(EARLY, "--warmup-steps", "4", "--executor", executor, code=None)
    assert run.code == 1
    assert "the end, after 12 steps" in run.output or "has ended" in run.output


MODELS = """
    model = nn.Linear(4 + rank, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model(torch.zeros(1, 4 + rank)).sum().backward()
    optimizer.step()
"""


def test_models_that_differ(dadt_run) -> None:
    run = dadt_run(MODELS, code=None)
    assert run.code == 1
    assert "every rank must build the same model" in run.output


CHOSEN = """
    lr = int.from_bytes(os.urandom(4), "big") / 2**40  # by each rank for itself
    model = nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model(torch.zeros(1, 4)).sum().backward()
    optimizer.step()
"""


def test_learning_rates_that_each_rank_has_chosen(dadt_run) -> None:
    run = dadt_run(CHOSEN, code=None)
    assert run.code == 1
    assert re.search(r"lr in group 0 of SGD is \S+ on rank 1 and \S+ on rank 0: each has chosen .* entropy", run.output)


SINGLE = """
    one, other = (nn.Parameter(torch.ones(1) + i) for i in range(2))
    optimizer = torch.optim.SGD([one, other], lr=0.01)
    for step in range(10):
        optimizer.zero_grad()
        (torch.stack([one, other], 1) * torch.full((1, 2), 1.0 + rank)).sum().backward()  # strides of 2
        optimizer.step()
    report({"one": one.detach().clone(), "other": other.detach().clone()})
"""


def test_gradients_of_one_value(shared) -> None:
    assert_equal(*shared["pipe"].of("single").ranks)


IDENTICAL = """
    from harness.scenarios import backward, SCENARIOS, mlp
    torch.manual_seed(0)
    model = mlp(); optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(10):
        backward(SCENARIOS["momentum"], model, {rank}, step)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
def test_identical_gradients_are_noticed(dadt_run, shared) -> None:
    assert "they train on the same data" in dadt_run(IDENTICAL.format(rank="0")).output
    assert len(shared["pipe"].of("unlike").ranks) == 2
    assert "they train on the same data" not in shared["pipe"].output


MOMENTUM_ENCODER = """
    from harness.scenarios import batch, snapshot
    class Momentum(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = nn.Linear(6, 3), nn.Linear(6, 3)
            self.key.requires_grad_(False)
        def forward(self, x, within):
            if within:
                self.update()
            return self.query(x) - self.key(x)
        @torch.no_grad()
        def update(self):
            for k, q in zip(self.key.parameters(), self.query.parameters()):
                k.lerp_(q, 0.1)
    torch.manual_seed(0)
    model = Momentum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(70):
        x, y = batch(rank, step, 0)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, {within}), y).backward()
        optimizer.step()
        if not {within}:
            model.update()
    report(snapshot(model, optimizer))
"""


@pytest.mark.parametrize("within", [True, False])
def test_an_encoder_that_follows_another(dadt_run, within) -> None:
    run = dadt_run(MOMENTUM_ENCODER.format(within=within), "--warmup-steps", "4")
    assert ("parameters that are not trained differ between ranks" in run.output) == within
    if not within:
        assert_equal(*run.ranks)


NOISE = """
    from harness.scenarios import batch
    class Langevin(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.add_(torch.randn(p.shape, generator=own), alpha=1e-4)
    own = torch.Generator().manual_seed(rank)
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = Langevin(model.parameters(), lr=0.05)
    for step in range(140):
        x, y = batch(rank, step, 0)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


@pytest.mark.parametrize("count", [1, 3, 8, 10, 64])
def test_all_weights_are_looked_at_in_turn(count: int) -> None:
    for changed in range(count):
        same = [torch.zeros(3) for _ in range(count)]
        other = [torch.full((3,), float(i == changed)) for i in range(count)]
        assert any(of_trained(same, look) != of_trained(other, look) for look in range(-(-count // 4)))


@pytest.mark.parametrize("algorithm", ["pipe", pytest.param("sync", marks=pytest.mark.slow)])
def test_weights_that_come_to_differ_are_told_once(dadt_run, algorithm) -> None:
    run = dadt_run(NOISE, "--algorithm", algorithm, code=1)
    assert run.output.count("the ranks' weights differ, though the gradients that were averaged did not") == 1


BUFFERS = """
    from harness.scenarios import batch, snapshot
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model.register_buffer("table", torch.arange(6.0) + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    norm, own = model[1], []
    for step in range(20):
        x, y = batch(rank, step, 0)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        own.append(norm.running_mean.clone())
    model.eval()
    official = norm.running_mean.clone()
    model.train()
    back = norm.running_mean.clone()
    state = snapshot(model, optimizer)  # a checkpoint: from here on the official ones are the rank's own
    with open(f"saved{rank}.pt", "wb") as f:
        torch.save(model.state_dict(), f)
    report({"state": state, "own": own, "official": official, "back": back})
"""


LATE = """
    import threading
    from dadt import _core
    from dadt.inject import worker
    from harness.scenarios import backward, SCENARIOS, mlp
    model = mlp(); optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(8):
        backward(SCENARIOS["momentum"], model, rank, step)
        if step == 7:  # what comes next in the order takes long, as over a slow line
            layout = _core.Layout(_core.DType.float32, [0])
            before = worker.runtime.ranks.engine.allreduce(layout, [0], [0], "before", held=rank == 1)
        optimizer.step()
        optimizer.zero_grad()
    if rank == 1:
        line = threading.Timer(5.0, worker.runtime.ranks.engine.release, [before])
        line.daemon = True
        line.start()
    report(optimizer.state_dict()["dadt"]["state"]["in_flight"] if rank == 0 else None)
"""


@pytest.fixture(scope="module")
def shared(shared_run) -> dict[str, Run]:
    unlike = IDENTICAL.format(rank="rank") + "    report({})\n"
    both = {"plateau": PLATEAU, "buffers": BUFFERS, "restored": RESTORED, "single": SINGLE}
    options = "--warmup-steps", "4", "--algorithm"
    return {
        "pipe": shared_run(joined(**both, unlike=unlike, late=LATE), *options, "pipe"),  # rank 1 ends in `late`
        "sync": shared_run(joined(**both), *options, "sync"),
    }


@pytest.mark.parametrize("algorithm", ["pipe", "sync"])
def test_learning_rates_that_differ(shared, algorithm) -> None:
    run = shared[algorithm].of("plateau")
    assert "rank 0's are used on all" in run.output
    assert_replicas_equal(run)


@pytest.mark.parametrize(("algorithm", "apart"), [("pipe", (11, 13)), ("sync", ())])
def test_a_schedule_restored_on_rank_0_alone(shared, algorithm, apart) -> None:
    """Betas, epsilon and decay follow rank 0's as learning rates do. `pipe` hears of it one step late, twice."""
    first, second = shared[algorithm].of("restored").ranks
    assert len({values["betas"] for values in first["used"]}) > 20, "OneCycleLR moves them"
    assert (first["used"][0]["eps"], first["used"][18]["eps"], first["used"][18]["weight_decay"]) == (1e-8, 1e-7, 0.3)
    for step, (mine, theirs) in enumerate(zip(first["used"], second["used"], strict=True)):
        assert mine == theirs or step in apart, step
        assert torch.equal(first["weights"][step], second["weights"][step]) or step in apart, step


@pytest.mark.parametrize("algorithm", ["pipe", "sync"])
def test_buffers_are_averaged_for_the_script_and_own_in_training(shared, algorithm) -> None:
    import torch

    run = shared[algorithm].of("buffers")
    assert_replicas_equal(run)
    a, b = run.ranks
    assert not torch.equal(a["own"][-1], b["own"][-1])
    assert torch.equal(a["own"][-1], a["back"])
    late = 2 if algorithm == "pipe" else 1
    assert torch.equal(a["official"], (a["own"][-late] + b["own"][-late]) / 2)


def test_one_rank_saves_at_the_end_what_is_still_under_way(shared) -> None:
    """Rank 1 has launched its part, and its script is over long before all has come."""
    assert len(shared["pipe"].of("late").ranks[0]) == 1


ALONE = """
    from harness.scenarios import backward, SCENARIOS, mlp
    model = mlp(); optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        backward(SCENARIOS["momentum"], model, rank, step)
        optimizer.step()
    report({"hooked": "dadt.train.runtime" in sys.modules, "state": dict(model.state_dict())})
"""


def test_inject_none_leaves_every_worker_to_itself(dadt_run) -> None:
    import torch

    run = dadt_run(ALONE, "--inject", "none", alone=True)
    assert [r["hooked"] for r in run.ranks] == [False, False]
    assert not torch.equal(run.ranks[0]["state"]["0.weight"], run.ranks[1]["state"]["0.weight"])
    assert "training was NOT distributed" in run.output
