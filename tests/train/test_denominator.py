"""What a loss divides by is read from its graph, or nothing is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dadt.train import denominator

LABELS = torch.tensor([0, 1, 2, -100, 4, 1])
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0])
MASK = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
TRUE = MASK.bool()[:, None]
COUNTED = 0.5 + 1 + 2 + 8 + 1


def logits() -> Tensor:
    torch.manual_seed(0)
    return nn.Linear(4, 5)(torch.randn(6, 4))


def read(loss: Tensor | list[Tensor]) -> float | None:
    found = denominator.of(loss)
    return None if found is None else found.read()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda x: F.cross_entropy(x, LABELS), 5),
        (lambda x: nn.CrossEntropyLoss(weight=WEIGHTS)(x, LABELS), COUNTED),
        (lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1), 5),
        (lambda x: F.cross_entropy(x, LABELS, weight=WEIGHTS, label_smoothing=0.1), COUNTED),
        (lambda x: F.cross_entropy(x.view(2, 3, 5).transpose(1, 2), LABELS.view(2, 3)), 5),
        (lambda x: F.nll_loss(x.log_softmax(1), LABELS), 5),
        (lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(6, 5), weight=WEIGHTS), 30),
        (lambda x: F.cross_entropy(x, LABELS) / 4, 5),
        (lambda x: 0.25 * -F.cross_entropy(x, LABELS).view(1).clone().mean(), 5),
        (lambda x: F.cross_entropy(x, LABELS) * torch.tensor(65536.0), 5),  # as a GradScaler does
        (lambda x: F.cross_entropy(x.bfloat16(), LABELS).float(), 5),
        (lambda x: sum([F.cross_entropy(x, LABELS)]), 5),
        (lambda x: F.cross_entropy(x, LABELS) + 0.1 * F.cross_entropy(2 * x, LABELS), 5),
        (lambda x: [F.cross_entropy(x, LABELS), F.cross_entropy(2 * x, LABELS)], 5),
        (lambda x: F.cross_entropy(x, LABELS, reduction="sum") / 12, 12),
        (lambda x: F.cross_entropy(x, LABELS, reduction="sum") / torch.tensor(12) / 4, 12),
        (lambda x: (F.cross_entropy(x, LABELS, reduction="none") * MASK).sum() / MASK.sum(), 3),
        (lambda x: F.cross_entropy(x, LABELS, reduction="none")[MASK.bool()].mean(), 3),
        (lambda x: -x.log_softmax(1).gather(1, LABELS.clamp(0)[:, None]).masked_fill(~TRUE, 0).sum() / TRUE.sum(), 3),
    ],
)
def test_of_one_mean(loss: Callable[[Tensor], Tensor], expected: float) -> None:
    assert read(loss(logits())) == pytest.approx(expected)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.cross_entropy(x, LABELS, reduction="sum"),
        lambda x: F.cross_entropy(x, LABELS, reduction="sum") / 4,  # fewer than it counts: no mean
        lambda x: F.cross_entropy(x, LABELS) + F.mse_loss(x, torch.ones(6, 5)),
        lambda x: F.cross_entropy(x, LABELS) + F.cross_entropy(x[:3], LABELS[:3]),
        lambda x: F.cross_entropy(x, LABELS) ** 2,
        lambda x: 1 / F.cross_entropy(x, LABELS),
        lambda x: F.cross_entropy(x, LABELS) * nn.Parameter(torch.ones(())),
        lambda x: (F.cross_entropy(x, LABELS, reduction="none") ** 2).mean(),
        lambda x: (F.cross_entropy(x, LABELS, reduction="none") ** 2).sum() / 5,
        lambda x: F.cross_entropy(x, torch.full((6, 5), 0.2)),
        lambda x: F.mse_loss(x, torch.ones(6, 5)),
        lambda x: torch.compile(F.cross_entropy, backend="aot_eager")(x, LABELS),
    ],
)
def test_of_anything_else(loss: Callable[[Tensor], Tensor]) -> None:
    assert read(loss(logits())) is None


def test_a_compiled_model_changes_nothing() -> None:
    model = torch.compile(nn.Linear(4, 5), backend="aot_eager", fullgraph=True)
    assert read(F.cross_entropy(model(torch.randn(6, 4)), LABELS)) == 5


def test_a_graph_that_is_gone() -> None:
    loss = F.cross_entropy(logits(), LABELS)
    loss.backward()
    assert read(loss) is None


def test_where_to_say_that_a_loss_is_not_known() -> None:
    x = logits()
    each = F.cross_entropy(x, LABELS, reduction="none")
    assert denominator.has_entropy((each**2).mean())
    assert denominator.has_entropy(torch.compile(F.cross_entropy, backend="aot_eager")(x, LABELS))
    assert not denominator.has_entropy(F.mse_loss(x, torch.ones(6, 5)))
