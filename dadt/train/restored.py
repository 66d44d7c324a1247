"""Exchanges in a checkpoint: the averages of exchanges in flight, and objects that replace the exchanges when training
continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from dadt.comm.compression import LowRank
from dadt.train.exchange.bucket_plan import BucketPlan
from dadt.train.exchange.exchange import Exchange
from dadt.train.exchange.step_metadata import StepMetadata, mean_loss
from dadt.train.ranks import Ranks


class Trained(Protocol):
    """Interface of an optimizer that DADT manages, with the members that exchanges use."""

    ranks: Ranks

    @property
    def name(self) -> str: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def parameters(self) -> list[torch.Tensor]: ...

    @property
    def modules(self) -> list[nn.Module]: ...

    @property
    def schema(self) -> BucketPlan: ...


class RestoredExchange:
    """Replaces, in a resumed training, an Exchange whose averages are stored in the checkpoint."""

    def __init__(self, attachment: Trained, state: dict[str, Any]) -> None:
        """state: the averages of one exchange, as stored in a checkpoint."""
        parameters = list(numbers_of(attachment.optimizer))
        self.frozen = frozenset(id(parameters[i]) for i in state.get("frozen", ()))
        gradients = [(parameters[i], g) for i, g in state["gradients"].items()]
        self._gradients = [
            (p, g.to(p.device, copy=True)) for p, g in gradients if p.requires_grad or id(p) in self.frozen
        ]
        places = places_of(attachment)
        self._buffers = {places[i]: b.clone() for i, b in state["buffers"].items() if i < len(places)}
        self._norm = state["norm"]
        self.value = state["value"]
        self._loss = state.get("loss", 0.0)
        self.scale = state["scale"]
        self.schema = attachment.schema
        self.parameters = attachment.parameters
        self.name = f"the checkpoint's gradient{attachment.name}"
        self._not_finite = state.get("not_finite", [0])
        """The `not_finite` value of each rank's metadata, in the order of ranks."""
        self.square = state.get("square", 0.0)
        self._learned = state.get("learned", {})
        self.number = -1
        self.seconds = self.waited = 0.0
        self.halfway = False

    def receive(self) -> list[StepMetadata]:
        learned, self._learned = self._learned, {}
        for index, of_bucket in learned.items():
            if index < len(self.schema.forms) and isinstance(form := self.schema.forms[index], LowRank):
                device = form.bucket.device
                form.learn([(mean.to(device), None if lost is None else lost.to(device)) for mean, lost in of_bucket])
        return self.wait()

    def go_on(self) -> None:
        """Does nothing, because an exchange from a checkpoint has no allreduce left to launch."""

    def wait(self) -> list[StepMetadata]:
        crc, value = self.schema.crc, self.value
        return [StepMetadata(crc, 0, 0, 0, 0, False, 1.0, value, n, loss=self._loss) for n in self._not_finite]

    def learned(self) -> dict[int, Any]:
        """Return the compression's pending state updates, by the bucket's index."""
        return dict(self._learned)

    def norm(self) -> torch.Tensor:
        return torch.tensor(self._norm, dtype=torch.float64, device="cpu")

    def averaged_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return self._gradients

    @property
    def places(self) -> list[tuple[nn.Module, str]]:
        return list(self._buffers)

    def averaged_buffers(self) -> list[torch.Tensor]:
        return list(self._buffers.values())


def flight(attachment: Trained, exchange: Exchange | RestoredExchange) -> dict[str, Any]:
    """Return the averages of an exchange in flight, for a checkpoint. All ranks must have launched the exchange. Waits
    for the averages; raises CommError."""
    lanes = exchange.wait()
    indices = numbers_of(attachment.optimizer)
    places = {place: i for i, place in enumerate(places_of(attachment))}
    buffers = zip(exchange.places, exchange.averaged_buffers(), strict=True)
    return {
        "gradients": {indices[p]: _kept(g) for p, g in exchange.averaged_gradients() if p in indices},
        "frozen": [i for p, i in indices.items() if id(p) in exchange.frozen],
        "buffers": {places[place]: _kept(b) for place, b in buffers if place in places},
        "norm": float(exchange.norm()),
        "square": exchange.square,
        "value": max((lane.value for lane in lanes), default=0.0),
        "loss": mean_loss(lanes),
        "scale": exchange.scale,
    }


def flights(attachment: Trained, exchange: Exchange | RestoredExchange | None) -> list[dict[str, Any]]:
    """Return the averages of the exchange in flight as a list for a checkpoint. The list is empty if no exchange is in
    flight, or if all ranks must still launch the second allreduce of low-rank buckets."""
    if exchange is not None and exchange.halfway:
        attachment.ranks.say(
            "a checkpoint leaves out the gradient in flight: on a GPU --compression powersgd ends it in a step"
        )
    return [] if exchange is None or exchange.halfway else [flight(attachment, exchange)]


def by_index(value: Any, indices: dict[torch.Tensor, int]) -> Any:
    """Return the dict `value` with parameters' indices in place of parameters as keys, and with copies of the tensors
    on the host. Returns a value that is not a dict unchanged."""
    return {indices[p]: _kept(t) for p, t in value.items() if p in indices} if isinstance(value, dict) else value


def by_parameter(value: Any, parameters: Sequence[torch.Tensor]) -> Any:
    """Return the dict `value` with parameters in place of their indices as keys, the inverse of `by_index`. Returns a
    value that is not a dict unchanged."""
    if not isinstance(value, dict):
        return value
    return {parameters[i]: t for i, t in value.items() if i < len(parameters)}


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, so that a checkpoint needs no memory on a nearly full GPU."""
    return tensor.to("cpu", copy=True)


def numbers_of(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, int]:
    """Return each parameter's index, which the optimizer's state dict also uses for it."""
    every = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
    return {p: i for i, p in enumerate(every)}


def places_of(attachment: Trained) -> list[tuple[nn.Module, str]]:
    """Return module and name of each buffer that may be averaged, in the order of modules."""
    return [
        (m, n) for m in attachment.modules for n, b in m._buffers.items() if b is not None and b.is_floating_point()
    ]
