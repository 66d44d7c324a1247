"""Optimizers of which the next step is known, in the midst of a training."""

from __future__ import annotations

import torch

from dadt.train.prediction.expectation import Expectation

ADAM = {"lr": 0.01, "betas": (0.8, 0.95)}
SGD = {"lr": 0.1, "momentum": 0.9}
WAYS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd, decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, SGD),
    "dampening, decay": (torch.optim.SGD, {**SGD, "dampening": 0.3, "weight_decay": 0.1}),
    "nesterov, decay": (torch.optim.SGD, {**SGD, "nesterov": True, "weight_decay": 0.1}),
    "momentum, maximize, decay": (torch.optim.SGD, {**SGD, "maximize": True, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, ADAM),
    "adam, decay": (torch.optim.Adam, {**ADAM, "weight_decay": 0.1}),
    "adam, maximize, decay": (torch.optim.Adam, {**ADAM, "maximize": True, "weight_decay": 0.1}),
    "adamw, rate in a tensor": (torch.optim.AdamW, {**ADAM, "lr": torch.tensor(0.01), "foreach": False}),
    "adamw": (torch.optim.AdamW, {**ADAM, "weight_decay": 0.1}),
    "adamw, fused": (torch.optim.AdamW, {**ADAM, "weight_decay": 0.1, "fused": True}),
}
KINDS = {
    "float32": lambda: torch.randn(7, 5),
    "float64": lambda: torch.randn(7, 5, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(7, 5).bfloat16(),
    "by columns": lambda: torch.randn(5, 7).t(),
    "with holes": lambda: torch.randn(7, 10)[:, ::2],
    "complex": lambda: torch.randn(7, 5, dtype=torch.complex64),
}


def begun(way: str, kind: str, device: str = "cpu") -> tuple[torch.Tensor, torch.optim.Optimizer, Expectation]:
    """A parameter after three steps, whose gradient in flight is known: `.grad`."""
    torch.manual_seed(1)
    make, options = WAYS[way]
    w = KINDS[kind]().to(device).requires_grad_()
    moved = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in options.items()}
    optimizer = make([w], **moved)
    prediction = Expectation(optimizer, [w], share=1.0)
    own = in_flight = torch.randn_like(w)
    for step in range(4):
        own, in_flight = torch.randn_like(w), own
        w.grad = own
        prediction.before_step(late=step > 1, scale=None)
        w.grad = [own, None, in_flight, in_flight][step]  # the first late step applies nothing
        optimizer.step()
        prediction.after_step(held=step == 1, scale=None)
    w.grad = own
    return w, optimizer, prediction


def foresees(way: str, kind: str, device: str = "cpu") -> None:
    """The weights are predicted where the optimizer then puts them, and true again before."""
    w, optimizer, prediction = begun(way, kind, device)
    before = w.detach().clone()
    prediction.apply()
    ahead = w.detach().clone()
    prediction.undo()
    assert torch.equal(w, before)
    assert not torch.equal(ahead, before)
    optimizer.step()
    tolerance = {"rtol": 0.02, "atol": 0.02} if kind == "bfloat16" else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(ahead, w.detach(), **tolerance)


# torch's fused step takes neither complex numbers nor holes.
PAIRS = [(w, k) for w in WAYS for k in KINDS if "fused" not in w or k not in ("complex", "with holes")]
