"""The interface of an algorithm: hooks around one optimizer's step, in the order of a training step."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from dadt.train.exchange.exchange import Exchange
from dadt.train.exchange.step_metadata import StepMetadata
from dadt.train.in_flight import InFlight
from dadt.train.prediction.base import Prediction
from dadt.train.restored import RestoredExchange, Trained


class Attached(Trained, Protocol):
    """One optimizer, as an algorithm sees it, explained in docs/extending.md, and what else trains it."""

    algorithm: Algorithm
    prediction: Prediction
    index: int
    step: int
    """Steps that the optimizer has taken."""
    warmup_steps: int
    known: WeakTensorKeyDictionary
    """The parameters that all ranks have from the first one."""

    def buffers(self) -> list[tuple[nn.Module, str, torch.Tensor]]: ...

    def forget_launched(self, exchange: Exchange | None) -> None: ...

    def new_exchange(self, *, again: bool = False) -> Exchange: ...

    def close(self, exchange: Exchange, *, growth: int = 0, redo: bool = False, value: float = 0.0) -> None: ...

    def wait(self, exchange: Exchange | RestoredExchange) -> list[StepMetadata]: ...

    def agree(self, lanes: list[StepMetadata], exchange: Exchange | RestoredExchange) -> None: ...

    def deliver(self, exchange: Exchange | RestoredExchange) -> None: ...


class Relaunched(InFlight, Protocol):
    """An exchange that can be launched again, on another connection."""

    began: float

    def repeat(self) -> None: ...


class Algorithm(abc.ABC):
    """Decides what is exchanged, when, and how it is applied. One instance per optimizer.

    All hooks run on the training thread of one rank. Where `identical`, every rank runs the same sequence of them.
    """

    identical = True
    """Whether all ranks take the same steps, and have the same weights after each."""

    together = True
    """Whether all ranks take the same steps. Where not, each goes at its own speed, and nothing waits for a peer
    between the first step and the end."""

    in_flight = 1
    """Exchanges that are under way at once, at most, from one step to the next."""

    survives = False
    """Whether training goes on when ranks are lost: there is a `regroup`."""

    tries = False
    """Whether the coming step tries its compression, within the warm-up."""

    wants_gradients = False
    """Whether `gradient_ready` is to be called."""

    def __init__(self, attachment: Attached) -> None:
        self.attachment = attachment

    @property
    def predicts(self) -> bool:
        """Whether the next training forward is to run at predicted weights."""
        return False

    @property
    def tracks(self) -> bool:
        """Whether what the coming step does will be wanted for prediction."""
        return False

    @property
    def holds(self) -> bool:
        """Whether this step applies nothing, because no gradient has arrived yet."""
        return False

    @property
    def averages(self) -> bool:
        """Whether the coming step uses averaged gradients, those of a closure, too; else they are the rank's own."""
        return self.together

    def starting(self) -> None:  # noqa: B027 (optional hook)
        """All ranks are about to take rank 0's weights and state."""

    def started(self) -> None:  # noqa: B027 (optional hook)
        """The optimizer is attached: all ranks have rank 0's weights and state."""

    def gradient_ready(self, parameter: torch.Tensor) -> None:  # noqa: B027 (optional hook)
        """A backward has added to this parameter's gradient. Called only where `wants_gradients`."""

    @abc.abstractmethod
    def before_step(self) -> None:
        """Gradients are about to be used: make `.grad` what the optimizer shall apply."""

    def after_step(self) -> None:  # noqa: B027 (optional hook)
        """The optimizer has stepped, or the step was skipped by agreement."""

    @property
    def rests(self) -> bool:
        """Whether nothing is under way that `state` would leave out."""
        return True

    @property
    def launched(self) -> Exchange | None:
        """What this step has launched, while it waits for an exchange."""
        return None

    @property
    def pending(self) -> Exchange | RestoredExchange | None:
        """What earlier steps have launched, as it was before this step."""
        return None

    def regroup(self, behind: bool, keep: bool) -> Exchange | None:
        """Ranks were lost, and with them what was under way: go back to before this step, whose `before_step` failed if
        it was in it. Returns the exchange that is to be launched once more.

        behind: others have had the averages of this step, or of the coming one; their weights and state are in place,
        and nothing is to be applied in it. keep: what earlier steps have launched can be launched again, on all ranks.
        """
        return None

    def common(self) -> Mapping[int, torch.Tensor]:
        """What all ranks have in common in place of a parameter's value, by the parameter's id. Nothing is listed where
        the values themselves are equal."""
        return {}

    def rounds(self) -> dict[str, list[int]]:
        """How far this rank is in exchanges that belong to no step, for `follow`."""
        return {}

    def follow(self, rounds: Sequence[Mapping[str, Sequence[int]]]) -> Sequence[Relaunched]:
        """Ranks were lost, and with them what was under way beside the steps: come as far as the furthest rank. rounds:
        what each rank gave, by rank of the group. Returns what is to be launched once more. Raises CommError."""
        return []

    def loaded(self) -> None:  # noqa: B027 (optional hook)
        """The script has replaced weights by `load_state_dict`."""

    def finish(self) -> None:  # noqa: B027 (optional hook)
        """The script has ended, on this rank: bring what is in flight to its end. Peers may still train, unless
        `identical`. Raises CommError."""

    def state(self) -> dict[str, Any]:
        """State that a resumed training needs beside weights and optimizer state: plain values and CPU tensors."""
        return {}

    def by_parameter(self, state: dict[str, Any]) -> dict[int, torch.Tensor]:
        """What `state` holds in a parameter's shape, by its number in the optimizer: where a shape is another, the
        checkpoint is one of another model."""
        return {}

    def observe(self) -> dict[str, Any]:
        """What is this rank's own between two steps beside `state`. Nothing is waited for or changed."""
        return {}

    def restore(self, own: dict[str, Any]) -> None:  # noqa: B027 (optional hook)
        """Go on with the same bits from what `observe` gave on this rank, after `load_state`."""

    def load_state(self, state: dict[str, Any]) -> None:  # noqa: B027 (optional hook)
        """Go on from what `state` gave, on all ranks."""
