"""What scripts do around a step, one feature after the other: each trains a small model by its own optimizer, asserts
what must hold on every rank, and gives what the ranks shall have in common, or each for itself."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler, swa_utils

STEPS = 40
Draw = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]


class Trained(NamedTuple):
    model: nn.Module
    kept: list[Any]
    """Optimizers: the average at the end is of those that live."""
    seen: dict[str, Any]
    """Beside the weights: what is the same on all ranks, or the rank's own, by the algorithm."""


def points(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
    return x, x[:, :3].argmax(1)


def words(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, 12, (16,), generator=torch.Generator().manual_seed(1000 * rank + step))
    return x, x % 3


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def normed(norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), norm(8), nn.Tanh(), nn.Linear(8, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, draw: Draw) -> float:
    """On samples that no rank trains on, as a script evaluates."""
    x, y = zip(*(draw(99, step) for step in range(8)))
    model.eval()
    with torch.no_grad():
        loss = float(F.cross_entropy(model(torch.cat(x)), torch.cat(y)))
    model.train()
    return loss


def train(rank: int, model: nn.Module, one: Callable[..., None], draw: Draw = points) -> None:
    """one(step, x, y) is a training step, from the forward to zeroed gradients."""
    before = loss_of(model, draw)
    for step in range(STEPS):
        one(step, *draw(rank, step))
    after = loss_of(model, draw)
    assert after < 0.8 * before, (before, after)
    assert all(value.isfinite().all() for value in model.state_dict().values())


def plain(model: nn.Module, *optimizers: torch.optim.Optimizer, call: nn.Module | None = None) -> Callable[..., None]:
    def one(step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy((call or model)(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return one


def half_with_scaler(rank: int) -> Trained:
    model = mlp()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def one(step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss * float("inf") if (rank, step) == (1, 12) else loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    train(rank, model, one)
    return Trained(model, [optimizer], {"loss scale": scaler.get_scale()})


def bfloat16(rank: int) -> Trained:
    model = mlp()
    optimizer = sgd(model)
    step_of = plain(model, optimizer)

    def one(*args: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            step_of(*args)

    train(rank, model, one)
    return Trained(model, [optimizer], {})


def clipping(rank: int) -> Trained:
    model = mlp()
    optimizer = sgd(model)
    norms = []

    def one(step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        if step % 4 == 3:
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
        else:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
            assert sum(float(p.grad.pow(2).sum()) for p in model.parameters()) <= 0.301**2
        optimizer.step()
        optimizer.zero_grad()

    train(rank, model, one)
    return Trained(model, [optimizer], {"norms": norms})


def accumulation(rank: int) -> Trained:
    model = mlp()
    optimizer = sgd(model)

    def one(step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        for part in zip(x.chunk(4), y.chunk(4)):
            (F.cross_entropy(model(part[0]), part[1]) / 4).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 > 0)

    train(rank, model, one)
    return Trained(model, [optimizer], {})


def synchronized_norm(rank: int) -> Trained:
    """Without a process group it is BatchNorm, to torch."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(normed())
    assert type(model[1]) is nn.SyncBatchNorm
    optimizer = sgd(model)
    train(rank, model, plain(model, optimizer))
    model.eval()
    return Trained(model, [optimizer], {"statistics": model[1].running_mean.clone()})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.middle = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.decode = nn.Linear(8, 12, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.middle(self.encode(x)).tanh())


def tied(rank: int) -> Trained:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    assert len(optimizer.param_groups[0]["params"]) == 3
    train(rank, model, plain(model, optimizer), words)
    assert model.decode.weight is model.encode.weight
    return Trained(model, [optimizer], {})


def sparse(rank: int) -> Trained:
    """Gradients are sparse where the optimizer uses them, and also where this rank has not touched the table."""
    model = nn.Sequential(nn.Embedding(12, 8, sparse=True), nn.Linear(8, 3))
    table = torch.optim.SparseAdam(model[0].parameters(), lr=0.05)
    head = torch.optim.SGD(model[1].parameters(), lr=0.2)
    layouts = set()

    def look(*_: Any) -> None:
        gradient = model[0].weight.grad
        layouts.add(None if gradient is None else gradient.layout)

    table.register_step_pre_hook(look)

    def one(step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        untouched = (rank, step) == (1, 20)
        out = model[1](model[0].weight.detach()[x]) if untouched else model(x)
        F.cross_entropy(out, y).backward()
        for optimizer in (table, head):
            optimizer.step()
            optimizer.zero_grad()

    train(rank, model, one, words)
    assert layouts <= {None, torch.sparse_coo} and torch.sparse_coo in layouts, layouts
    return Trained(model, [table, head], {})


def compiled_model(rank: int) -> Trained:
    model = mlp()
    optimizer = sgd(model)
    called = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(rank, model, plain(model, optimizer, call=called))
    return Trained(model, [optimizer, called], {})


def compiled_optimizer(rank: int) -> Trained:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.02))
    schedule = lr_scheduler.StepLR(optimizer, STEPS // 2, 0.5)

    @torch.compile(backend="eager")
    def update() -> None:
        optimizer.step()
        schedule.step()

    def one(step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        update()
        optimizer.zero_grad()

    train(rank, model, one)
    assert abs(float(optimizer.param_groups[0]["lr"]) - 0.005) < 1e-8
    return Trained(model, [optimizer], {})


def compiled_step(rank: int) -> Trained:
    model = mlp()
    optimizer = sgd(model)
    update = torch.compile(optimizer.step, backend="eager")

    def one(step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        update()
        optimizer.zero_grad()

    train(rank, model, one)
    return Trained(model, [optimizer], {})


def averaged_weights(rank: int) -> Trained:
    """EMA of each step, and SWA with a schedule and statistics of its own."""
    model = normed()
    optimizer = sgd(model)
    moving = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
    average = swa_utils.AveragedModel(model)
    schedule = swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=10)
    step_of = plain(model, optimizer)
    true: list[torch.Tensor] = []  # the same average of the weights that `eval` shows

    def one(step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        step_of(step, x, y)
        moving.update_parameters(model)
        if step >= STEPS // 2:
            average.update_parameters(model)
            schedule.step()
        shown = [p.detach().clone() for p in model.eval().parameters()]
        model.train()
        true[:] = [0.9 * a + 0.1 * p for a, p in zip(true, shown)] if true else shown
        for value, expected in zip(moving.module.parameters(), true):
            assert torch.allclose(value, expected, atol=1e-6), step

    train(rank, model, one)
    assert loss_of(moving, points) < 1.0
    swa_utils.update_bn([points(rank, step)[0] for step in range(STEPS)], average)
    assert loss_of(average, points) < 1.0
    assert abs(optimizer.param_groups[0]["lr"] - 0.02) < 1e-6
    seen = {
        "moving": moving.state_dict(),
        "average": weights(average),
        "update_bn": average.module[1].running_mean.clone(),
    }
    return Trained(model, [optimizer], seen)


def schedules(rank: int) -> Trained:
    """Of learning rate and momentum; and a sequence of two."""
    model = mlp()
    one_cycle, other = sgd(model[0]), torch.optim.AdamW(model[2].parameters(), lr=0.02)
    both = [
        lr_scheduler.OneCycleLR(one_cycle, max_lr=0.1, total_steps=STEPS),
        lr_scheduler.SequentialLR(
            other, [lr_scheduler.LinearLR(other, 0.1, 1.0, 5), lr_scheduler.CosineAnnealingLR(other, STEPS - 5)], [5]
        ),
    ]
    step_of = plain(model, one_cycle, other)
    rates = []

    def one(step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        step_of(step, x, y)
        rates.append(other.param_groups[0]["lr"])
        for schedule in both if step < STEPS - 1 else []:
            schedule.step()

    train(rank, model, one)
    assert rates[0] < rates[4] < rates[5] and abs(rates[5] - 0.02) < 1e-6 and rates[-1] < 1e-3, rates
    assert abs(one_cycle.param_groups[0]["lr"] - 0.1 / 25e4) < 1e-6
    return Trained(model, [one_cycle, other], {})


def plateau(rank: int) -> Trained:
    """By the rank's own loss: rank 1 alone sees no progress, once."""
    model = mlp()
    optimizer = sgd(model)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    step_of = plain(model, optimizer)

    def one(step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        step_of(step, x, y)
        schedule.step(2.0 if (rank, step) == (1, 12) else 1.0 / (step + 1))

    train(rank, model, one)
    return Trained(model, [optimizer], {"rate of the plateau": optimizer.param_groups[0]["lr"]})


def loading(rank: int) -> Trained:
    """Model and optimizer go back in the middle, by all ranks, and take the same ten steps again."""
    model = normed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    step_of = plain(model, optimizer)
    stream = io.BytesIO()
    reached = []

    def one(step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        step_of(step, *(points(rank, step - 10) if step > 20 else (x, y)))
        if step == 10:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
        if step in (20, 30):
            reached.append(weights(model))
        if step == 20:
            stream.seek(0)
            saved = torch.load(stream, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            for name, value in model.state_dict().items():
                assert torch.equal(value, saved["model"][name]), name
            assert int(optimizer.state[model[0].weight]["step"]) == int(saved["optimizer"]["state"][0]["step"])

    train(rank, model, one)
    return Trained(model, [optimizer], {"reached twice": reached})


FEATURES: dict[str, list[Callable[[int], Trained]]] = {
    "fp16 autocast with `GradScaler`": [half_with_scaler],
    "bf16 autocast": [bfloat16],
    "gradient clipping": [clipping],
    "gradient accumulation": [accumulation],
    "`SyncBatchNorm`, no process group": [synchronized_norm],
    "tied weights": [tied],
    "sparse embeddings": [sparse],
    "`torch.compile`d models": [compiled_model],
    "`torch.compile`d optimizers": [compiled_optimizer, compiled_step],
    "EMA and SWA (`torch.optim.swa_utils`)": [averaged_weights],
    "learning rate schedules": [schedules],
    "`ReduceLROnPlateau` on a rank's own loss": [plateau],
    "`load_state_dict` in the middle": [loading],
}
"""By their rows in docs/algorithms.md."""


def train_all(rank: int) -> dict[str, Trained]:
    found = {}
    for title, features in FEATURES.items():
        for feature in features:
            torch.manual_seed(rank)  # rank 0's weights are everybody's
            found[feature.__name__] = trained = feature(rank)
            # Now: `local` averages all weights before the next one's optimizer is attached.
            trained.seen["weights"] = weights(trained.model)
            print(f"rank {rank}: {title} ({feature.__name__})", flush=True)
    return found


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}
