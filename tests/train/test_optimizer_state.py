"""What optimizers remember, wherever they keep it, comes to another one of the same kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dadt.errors import Mismatch
from dadt.train import optimizer_state


class Lookahead(torch.optim.Optimizer):
    """As in many gists: not made by Optimizer.__init__, with a `state_dict` that nothing can load, and a counter."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.base = torch.optim.AdamW(parameters, 0.1)
        self.count = 0
        self.param_groups, self.defaults = self.base.param_groups, self.base.defaults
        self.state = {p: {"slow": p.detach().clone()} for p in parameters}  # type: ignore[assignment]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.count += 1
        if self.count % 3 == 0:
            for p, state in self.state.items():
                p.data.copy_(state["slow"].lerp_(p.detach(), 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"slow": [state["slow"] for state in self.state.values()], "base": self.base.state_dict()}


class Around(torch.optim.Optimizer):
    """Around another one, with whose groups and state it works, and something of its own in attributes."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.kept: list[Any] = [{"sum": torch.zeros(3)}, 1.0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for p in self.param_groups[0]["params"]:
            self.kept[0]["sum"] += p.detach()
            p.add_(self.kept[0]["sum"], alpha=0.01 * self.kept[1])
        self.kept[1] += 0.5


class Averaged(torch.optim.Optimizer):
    """Schedule-free: weights of another point, in a state of its own layout, with a load_state_dict that takes it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.points: dict[int, torch.Tensor] = {}
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for i, p in enumerate(self.param_groups[0]["params"]):
            z = self.points.setdefault(i, p.clone())
            z.sub_(p.grad, alpha=0.1)
            p.lerp_(z, 1 / self.steps)

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.points = {i: z.clone() for i, z in state_dict["points"].items()}
        self.steps = state_dict["steps"]


def train(optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    parameters = optimizer.param_groups[0]["params"]
    for step in steps:
        for p in parameters:
            p.grad = torch.sin(p.detach() * 3 + step)
        optimizer.step()
    return [p.detach().clone() for p in parameters]


def made(kind: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind([nn.Parameter(torch.linspace(0, 1, 3)), nn.Parameter(torch.ones(3))])
    return optimizer


KINDS = [Lookahead, Around, Averaged, lambda p: torch.optim.Adam(p, 0.1, amsgrad=True), lambda p: torch.optim.SGD(p)]


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_on_as_the_other_one(kind) -> None:
    """From a rank that has trained to one that has just built it."""
    trained, new = made(kind), made(kind)
    weights = train(trained, range(5))
    optimizer_state.load(new, optimizer_state.encode(trained))
    with torch.no_grad():
        for p, value in zip(new.param_groups[0]["params"], weights, strict=True):
            p.copy_(value)
    for mine, theirs in zip(train(new, range(5, 12)), train(trained, range(5, 12)), strict=True):
        assert torch.equal(mine, theirs)


def test_what_wrappers_share_stays_shared() -> None:
    trained, new = made(Around), made(Around)
    train(trained, range(3))
    optimizer_state.load(new, optimizer_state.encode(trained))
    assert isinstance(new, Around)
    assert new.state is new.inner.state and new.param_groups is new.inner.param_groups


def test_numbers_that_are_a_rank_s_own_stay() -> None:
    trained, new = made(Averaged), made(Averaged)
    trained.rank, new.rank = 0, 1  # type: ignore[attr-defined]
    optimizer_state.load(new, optimizer_state.encode(trained, without={"rank"}))
    assert new.rank == 1  # type: ignore[attr-defined]


def test_a_tensor_without_a_place_is_told() -> None:
    class Late(torch.optim.SGD):
        pass

    trained, new = made(Late), made(Late)
    trained.late = torch.ones(3)  # type: ignore[attr-defined]
    with pytest.raises(Mismatch, match=r"Late remembers a tensor \(late\) on another rank"):
        optimizer_state.load(new, optimizer_state.encode(trained))


def test_which_steps_are_torch_s() -> None:
    class Named(torch.optim.SGD):
        """With torch's own step."""

    assert optimizer_state.is_torchs(made(torch.optim.Adam)) and optimizer_state.is_torchs(made(Named))
    assert not optimizer_state.is_torchs(made(Around))
