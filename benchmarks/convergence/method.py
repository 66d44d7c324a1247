"""How the ranks learn from each other in the simulator, written as one word: sync, plain, pipe, pipe:c=1.5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from dadt.prediction import auto_factors


@dataclass(frozen=True)
class Method:
    """`sync`; `plain`, the delay alone; `pipe` as DADT does it; and changes of `pipe` by key=value."""

    name: str
    delayed: bool = True
    warmup: int = 50
    staleness: int = 1
    fall_back: int = 1
    """1: back to synchronous steps where gradients blow up."""
    c: float | None = None
    """Prediction's factor of the last displacement; None: what DADT takes for the optimizer."""
    c2: float = 0.0
    """The factor of the displacement before the last one."""
    ramp: int = 0
    """Delayed steps over which the factors grow from 0."""
    rise: int = 0
    """Delayed steps over which the size of the steps rises from 0 again."""
    own: float | None = None
    """Predict by the optimizer's own step, as if this share of the rank's own gradient in flight, and else the last
    average that has arrived, were what it will be given."""
    mix: float = 0.0
    """Apply (1 + mix) updates less mix times the update before: error feedback for delayed updates."""

    @classmethod
    def parse(cls, text: str) -> Method:
        """Raises ValueError where it is no method."""
        base, _, more = text.partition(":")
        if base not in ("sync", "plain", "pipe"):
            raise ValueError(f"{text}: begin with sync, plain or pipe")
        given: dict[str, float] = {"c": 0.0} if base == "plain" else {}
        known = {f.name for f in fields(cls)} - {"name", "delayed"}
        for part in filter(None, more.split(",")):
            key, _, value = part.partition("=")
            if key not in known:
                raise ValueError(f"{text}: {key} is unknown; there are {', '.join(sorted(known))}")
            given[key] = float(value) if key in ("c", "c2", "mix", "own") else int(value)
        if "own" in given and given.get("staleness", 1) != 1:
            raise ValueError(f"{text}: own predicts one step ahead; leave staleness out")
        return cls(text, delayed=base != "sync", **given)  # type: ignore[arg-type]

    def factors(self, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
        return auto_factors(optimizer, self.staleness) if self.c is None else (self.c, self.c2)


def own_step(optimizer: torch.optim.Optimizer, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The displacements that the optimizer would make with these gradients; it and the weights stay as they are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in parameters]
    state = {
        p: {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in known.items()}
        for p, known in optimizer.state.items()
    }
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient.clone()
    optimizer.step()
    moved = [p.detach() - b for p, b in zip(parameters, before, strict=True)]
    with torch.no_grad():
        for p, b in zip(parameters, before, strict=True):
            p.copy_(b)
    optimizer.state.update(state)
    return moved
