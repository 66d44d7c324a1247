"""Base class of the algorithms: hooks around one optimizer's step, in the order in which a training step calls them."""

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
from dadt.train.trained import ParameterListing


class Attached(Trained, Protocol):
    """Interface of an optimizer that DADT manages, as algorithms (docs/extending.md) and other training code use it."""

    algorithm: Algorithm
    prediction: Prediction
    index: int
    step: int
    """Number of steps that the optimizer has taken."""
    warmup_steps: int
    compression: str
    has_closure: bool
    scale: torch.Tensor | None
    """Loss scale of the current step; None if the script has no GradScaler."""
    listing: ParameterListing
    known: WeakTensorKeyDictionary
    """Parameters whose values all ranks have copied from the first rank."""

    def buffers(self) -> list[tuple[nn.Module, str, torch.Tensor]]: ...

    def forget_launched(self, exchange: Exchange | None) -> None: ...

    def new_exchange(self, *, again: bool = False) -> Exchange: ...

    def close(self, exchange: Exchange, *, growth: int = 0, redo: bool = False, value: float = 0.0) -> None: ...

    def wait(self, exchange: Exchange | RestoredExchange) -> list[StepMetadata]: ...

    def agree(self, lanes: list[StepMetadata], exchange: Exchange | RestoredExchange) -> None: ...

    def deliver(self, exchange: Exchange | RestoredExchange) -> None: ...


class Relaunched(InFlight, Protocol):
    """Interface of an exchange that can be launched again on a new connection, after ranks were lost."""

    began: float

    def repeat(self) -> None: ...


class Algorithm(abc.ABC):
    """Decides which data ranks exchange for one optimizer, when, and how the result is applied. There is one instance
    per optimizer.

    All hooks run on the training thread of one rank. If `identical`, every rank runs the same sequence of hooks.
    """

    identical = True
    """Whether all ranks take the same steps and have the same weights after each."""

    together = True
    """Whether all ranks take the same steps. If false, each rank trains at its own speed, and nothing waits for a peer
    between the first step and the end."""

    in_flight = 1
    """Maximum number of exchanges that are still under way between two steps."""

    survives = False
    """Whether training continues when ranks are lost; requires a `regroup` method."""

    shares = False
    """Whether ranks that step without averaging gradients use common second moments, by which the optimizer divides."""

    tries = False
    """Whether the coming warm-up step uses a compression in order to measure it, since it may be chosen later."""

    wants_gradients = False
    """Whether backward passes call `gradient_ready` for each parameter."""

    def __init__(self, attachment: Attached) -> None:
        self.attachment = attachment

    @property
    def predicts(self) -> bool:
        """Whether the next training forward runs with predicted weights."""
        return False

    @property
    def tracks(self) -> bool:
        """Whether a later prediction needs to know by how much the coming step changes the weights."""
        return False

    @property
    def holds(self) -> bool:
        """Whether the current step applies nothing, because no averaged gradient has arrived yet."""
        return False

    @property
    def averages(self) -> bool:
        """Whether the coming step uses gradients averaged over ranks, including the gradients of each closure
        evaluation. If false, the step uses the rank's own gradients."""
        return self.together

    def starting(self) -> None:  # noqa: B027 (optional hook)
        """Called before all ranks load rank 0's weights and optimizer state."""

    def started(self) -> None:  # noqa: B027 (optional hook)
        """Called when the optimizer is attached and all ranks have rank 0's weights and optimizer state."""

    def gradient_ready(self, parameter: torch.Tensor) -> None:  # noqa: B027 (optional hook)
        """Called when a backward has added to this parameter's gradient, only if `wants_gradients`."""

    @abc.abstractmethod
    def before_step(self) -> None:
        """Set `.grad` to what the optimizer should apply. Called when a step is about to use gradients."""

    def after_step(self) -> None:  # noqa: B027 (optional hook)
        """Called when the optimizer has stepped, or when all ranks agreed to skip the step."""

    @property
    def rests(self) -> bool:
        """Whether a checkpoint of `state` would be complete, because no operation is under way whose effect `state`
        leaves out."""
        return True

    @property
    def launched(self) -> Exchange | None:
        """The exchange that this step has launched, while `before_step` still waits for an earlier exchange; otherwise
        None."""
        return None

    @property
    def pending(self) -> Exchange | RestoredExchange | None:
        """The exchange that was in flight when the current step began; between two steps, the exchange in flight."""
        return None

    def regroup(self, behind: bool, keep: bool) -> Exchange | None:
        """Return to the state before this step, even if its `before_step` failed. Called when ranks were lost, and all
        exchanges under way with them. Returns the exchange to launch again, or None if there is none.

        behind: whether other ranks already applied the averages of this or the coming step; in this case their weights
        and state were loaded on this rank, which must not apply anything in that step. keep: whether the exchanges that
        earlier steps launched can be launched again on all ranks.
        """
        return None

    def common(self) -> Mapping[int, torch.Tensor]:
        """Return tensors that are equal on all ranks, by parameter id, for parameters whose own values differ between
        ranks."""
        return {}

    def rounds(self) -> dict[str, list[int]]:
        """Return, by name, numbers that describe how far this rank is in exchanges that belong to no step, such as the
        weight averages of `local`. After a loss of ranks, all ranks compare these numbers."""
        return {}

    def follow(self, rounds: Sequence[Mapping[str, Sequence[int]]]) -> Sequence[Relaunched]:
        """Catch up with the rank that has finished most exchanges that belong to no step. Called when ranks were lost.
        rounds: what `rounds` returned on each rank, by its index in the group. Returns the exchanges to launch again.
        Raises CommError.
        """
        return []

    def loaded(self) -> None:  # noqa: B027 (optional hook)
        """Called when the script has replaced weights by `load_state_dict`."""

    def finish(self) -> None:  # noqa: B027 (optional hook)
        """Complete the exchanges in flight. Called when the script has ended on this rank; other ranks may still train,
        unless `identical` is true. Raises CommError."""

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed training needs besides weights and optimizer state, as plain values and CPU
        tensors."""
        return {}

    def by_parameter(self, state: dict[str, Any]) -> dict[int, torch.Tensor]:
        """Return the tensors in `state` that have a parameter's shape, by the parameter's index in the optimizer. If a
        shape differs, the checkpoint is of another model."""
        return {}

    def observe(self) -> dict[str, Any]:
        """Return the part of this rank's state between two steps that differs from other ranks' state, for a snapshot.
        Waits for nothing and changes nothing."""
        return {}

    def restore(self, own: dict[str, Any]) -> None:  # noqa: B027 (optional hook)
        """Load this rank's own state from a snapshot, so that training continues bit for bit. Called after
        `load_state`."""

    def load_state(self, state: dict[str, Any]) -> None:  # noqa: B027 (optional hook)
        """Load the algorithm's state from a checkpoint; called on all ranks."""
