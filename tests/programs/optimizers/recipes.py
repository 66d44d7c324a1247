"""How each optimizer is built over the small model, and how a step of it is taken, as its documentation says."""

from __future__ import annotations

import importlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

PACKAGES = {
    "torch.optim": "torch",
    "pytorch_optimizer": "pytorch_optimizer",
    "torch_optimizer": "torch_optimizer",
    "schedulefree": "schedulefree",
    "prodigyopt": "prodigyopt",
    "lion_pytorch": "lion-pytorch",
    "adabelief_pytorch": "adabelief-pytorch",
}
"""The names on PyPI, by modules."""
NO_OPTIMIZERS = {"torch.optim:Optimizer", "torch_optimizer:Optimizer"}
NOT_TRIED = {
    "CPUOffloadOptimizer": "needs a GPU",
    "DeMo": "averages by itself, in a process group",
    "DistributedMuon": "divides its work among the ranks by itself, in a process group",
}
OF_ITS_OWN = {
    "PCGrad": "it changes gradients before the step: each rank projects those of its own share, and these are averaged",
}
"""Those whose result depends on how a batch is divided."""
STEPS = 30
Loss = Callable[[], torch.Tensor]


@dataclass
class Recipe:
    build: Callable[[type, nn.Module], Any]
    step: Callable[[Any, nn.Module, Loss], Any]
    model: str = "kernels"
    """What the model consists of: "kernels" and matrices, "matrices" and vectors, or a "table" of sparse gradients."""
    dtype: torch.dtype = torch.float64
    """Double precision, so that it shows what is more than rounding."""


def names() -> Iterator[str]:
    """All that these packages export."""
    for module in PACKAGES:
        there = importlib.import_module(module)
        for name in sorted(dir(there)):
            if _is_optimizer(getattr(there, name)) and f"{module}:{name}" not in NO_OPTIMIZERS:
                yield f"{module}:{name}"


def find(name: str) -> tuple[type, Recipe]:
    module, _, kind = name.partition(":")
    return getattr(importlib.import_module(module), kind), OWN.get(name) or OWN.get(kind) or Recipe(_plain, backward)


def _is_optimizer(value: Any) -> bool:
    return inspect.isclass(value) and hasattr(value, "step") and hasattr(value, "zero_grad")


def _plain(kind: type, model: nn.Module) -> Any:
    return kind(model.parameters())


def with_(**options: Any) -> Callable[[type, nn.Module], Any]:
    return lambda kind, model: kind(model.parameters(), **options)


def with_model(**options: Any) -> Callable[[type, nn.Module], Any]:
    return lambda kind, model: kind(model, **options)


def around(**options: Any) -> Callable[[type, nn.Module], Any]:
    """Around an optimizer of torch's."""
    return lambda kind, model: kind(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), **options)


def two_kinds(flag: str = "use_muon") -> Callable[[type, nn.Module], Any]:
    """Matrices in a group of their own."""

    def build(kind: type, model: nn.Module) -> Any:
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        return kind([{"params": matrices, flag: True}, {"params": others, flag: False}])

    return build


def matrices(kind: type, model: nn.Module) -> Any:
    """Over matrices alone, as torch's Muon takes nothing else."""
    return kind([p for p in model.parameters() if p.ndim == 2])


def a_loss_scale(kind: type, model: nn.Module) -> Any:
    return kind(torch.optim.SGD(list(model.half().parameters()), lr=0.05))


# Steps ------------------------------------------------------------------------------------------------------------


def backward(optimizer: Any, model: nn.Module, loss: Loss) -> Any:
    optimizer.zero_grad()
    value = loss()
    value.backward()
    optimizer.step()
    return value


def closure(optimizer: Any, model: nn.Module, loss: Loss) -> Any:
    return optimizer.step(_closure(optimizer, loss))


def _closure(optimizer: Any, loss: Loss) -> Loss:
    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    return evaluate


def backward_and_closure(optimizer: Any, model: nn.Module, loss: Loss) -> Any:
    evaluate = _closure(optimizer, loss)
    value = evaluate()
    optimizer.step(evaluate)
    return value


def two_steps(optimizer: Any, model: nn.Module, loss: Loss) -> Any:
    value = loss()
    value.backward()
    optimizer.first_step(zero_grad=True)
    loss().backward()
    optimizer.second_step(zero_grad=True)
    return value


def with_a_graph(optimizer: Any, model: nn.Module, loss: Loss) -> Any:
    optimizer.zero_grad()
    value = loss()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it makes a cycle of references
        value.backward(create_graph=True)
    optimizer.step()
    for p in model.parameters():
        p.grad = None
    return value.detach()


def a_value(optimizer: Any, model: nn.Module, loss: Loss) -> Any:
    """The closure gives the loss of a backward that has been."""
    optimizer.zero_grad()
    value = loss()
    value.backward()
    optimizer.step(lambda: float(value))
    return value


def several_losses(optimizer: Any, model: nn.Module, loss: Loss) -> Any:
    optimizer.zero_grad()
    value = loss()
    optimizer.pc_backward([value, 0.1 * sum(p.square().sum() for p in model.parameters())])
    optimizer.step()
    return value


def within_the_backward(optimizer: Any, model: nn.Module, loss: Loss) -> Any:
    value = loss()
    optimizer.fused_backward(value, 0.01)
    return value


def scaled(optimizer: Any, model: nn.Module, loss: Loss) -> Any:
    optimizer.zero_grad()
    value = loss()
    optimizer.backward(value)
    optimizer.clip_main_grads(math.inf)
    optimizer.step()
    return value


def with_its_own_closure(optimizer: Any, model: nn.Module, loss: Loss) -> Any:
    """GSAM is given the loss' function and a batch."""
    optimizer.set_closure(lambda output, target: nn.functional.cross_entropy(output, target), loss.x, loss.y)
    optimizer.step()
    return loss()


SGD = torch.optim.SGD
ONES_OWN = {"base_optimizer": SGD, "lr": 0.05, "momentum": 0.9}


def gsam(kind: type, model: nn.Module) -> Any:
    base = SGD(model.parameters(), lr=0.05)
    from pytorch_optimizer import LinearScheduler, ProportionScheduler

    rates = LinearScheduler(base, t_max=STEPS, max_lr=0.05, min_lr=0.05)
    rho = ProportionScheduler(rates, max_lr=0.05, min_lr=0.05, max_value=0.05, min_value=0.05)
    return kind(model.parameters(), base_optimizer=base, model=model, rho_scheduler=rho)


OWN: dict[str, Recipe] = {
    "LBFGS": Recipe(with_(max_iter=4, lr=0.02), closure),
    "DeMo": Recipe(_plain, backward, "matrices"),
    "FAdam": Recipe(_plain, backward, dtype=torch.float32),
    "torch.optim:SGD": Recipe(with_(lr=0.05, momentum=0.9), backward),
    "torch.optim:Muon": Recipe(matrices, backward),
    "SpectralSphere": Recipe(matrices, backward),
    "torch_optimizer:Adafactor": Recipe(_plain, backward, "matrices"),
    "torch.optim:SparseAdam": Recipe(_plain, backward, "table"),
    "AliG": Recipe(with_(max_lr=0.1), a_value),
    "SAM": Recipe(with_(**ONES_OWN), backward_and_closure),
    "LookSAM": Recipe(with_(**ONES_OWN), backward_and_closure),
    "FriendlySAM": Recipe(with_(**ONES_OWN), backward_and_closure),
    "WSAM": Recipe(lambda kind, model: kind(model, model.parameters(), **ONES_OWN), backward_and_closure),
    "BSAM": Recipe(with_(num_data=240, lr=0.02), backward_and_closure),
    "GSAM": Recipe(gsam, with_its_own_closure),
    "LOMO": Recipe(with_model(), within_the_backward),
    "AdaLOMO": Recipe(with_model(), within_the_backward, "matrices"),
    "AdamMini": Recipe(with_model(lr=1e-3), backward),
    "Lookahead": Recipe(around(), backward),
    "Magma": Recipe(around(), backward),
    "OrthoGrad": Recipe(around(), backward),
    "TRAC": Recipe(around(), backward),
    "PCGrad": Recipe(around(), several_losses),
    "SafeFP16Optimizer": Recipe(a_loss_scale, scaled),
    "pytorch_optimizer:ScheduleFreeWrapper": Recipe(around(), backward),
    "schedulefree:ScheduleFreeWrapper": Recipe(around(), backward),
    "schedulefree:ScheduleFreeWrapperReference": Recipe(around(), backward),
    "CPUOffloadOptimizer": Recipe(with_(lr=1e-3), backward),
    "Ranger21": Recipe(with_(num_iterations=STEPS), backward),
    "AdaHessian": Recipe(_plain, with_a_graph),
    "SophiaH": Recipe(_plain, with_a_graph),
    "Adahessian": Recipe(_plain, with_a_graph),
    "AdamWScheduleFreeClosure": Recipe(_plain, closure),
    "RAdamScheduleFreeClosure": Recipe(_plain, closure),
    "SGDScheduleFreeClosure": Recipe(with_(lr=0.1), closure),
}
for name in ("AdaMuon", "AdaGO", "NorMuon", "MuonClip", "DistributedMuon", "pytorch_optimizer:Muon"):
    OWN[name] = Recipe(two_kinds(), backward)
