"""Compares the metadata (`StepMetadata`, called a lane) that each rank sends to all ranks with an exchange, and decides
from it, with the same result on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from dadt.errors import Mismatch
from dadt.train.exchange.exchange import Exchange
from dadt.train.exchange.fingerprint import of_gradient, of_inputs
from dadt.train.exchange.step_metadata import StepMetadata, mean_loss
from dadt.train.ranks import Ranks
from dadt.train.restored import RestoredExchange

FINGERPRINTED_STEPS = 20
"""Number of exchanges, from the first on, in which ranks compare fingerprints of their gradients and inputs, because
equal fingerprints mean that ranks train on the same data."""
_EVERY = 64
"""Number of exchanges from one comparison of the ranks' weights, which should be equal, to the next."""
_SAME_STEPS = 5
"""Number of consecutive steps with equal gradients or inputs on all ranks after which a warning is printed."""
_HALF = 16
"""Number of bits in the lower half of a 32-bit fingerprint. In the first exchanges the lower half is a fingerprint of
gradients and the upper half one of inputs. Later the lower half is one of untrained parameters and the upper half one
of trained parameters."""
_SEEN = 0x7FFF
"""Bit mask of the part of the input fingerprint that ranks compare; the masked value is 0 if no input was seen."""
_FRESH = 1 << 31
"""Flag bit above the input fingerprint: whether a step's inputs differ from the previous step's. Inputs that stay equal
from step to step, such as a number of rows or fixed noise, need not differ between ranks, so they cause no warning."""


class Adopt(Protocol):
    """Callback that loads rank 0's param_group values into this rank's optimizer; with `weights`, rank 0's weights and
    optimizer state as well."""

    def __call__(self, *, weights: bool) -> None: ...


class Agreement:
    """Compares the metadata that all ranks sent with an exchange of one optimizer, and warns of differences or raises
    an error, in the same way on all ranks."""

    def __init__(self, name: str, ranks: Ranks, adopt: Adopt) -> None:
        """name: suffix that names the optimizer in messages, empty for the first optimizer."""
        self._name = name
        self._ranks = ranks
        self._say = ranks.say
        self._adopt = adopt
        self.follows = False
        """Whether the script sets different param_group values on each rank at every step, so that rank 0's are fetched
        before each step."""
        self.loss = self.mean_loss = 0.0
        """Loss that this rank's closure returned last, and the mean of all ranks' losses that came with the newest
        averaged gradients."""
        self._agreed = -1
        """Number of the newest exchange when param_group values were last made equal on all ranks; -1 if they never
        were."""
        self._same_inputs = self._same_gradients = 0
        """Counts of consecutive steps: with equal inputs on all ranks, and with equal gradients while the inputs were
        unknown or inconclusive."""
        self._differ = False
        self._looks = True
        """Whether the inputs of the coming steps are still fingerprinted."""
        self._inputs = self._inputs_before = 0
        """Fingerprint of the inputs seen so far in the current step, and fingerprint of the previous step's inputs."""

    def saw(self, given: Any) -> None:
        """Add the inputs of a training forward to this step's fingerprint."""
        if self._looks:
            self._inputs = of_inputs(given, self._inputs)

    def fingerprint(
        self, number: int, parameters: Sequence[torch.Tensor], weights: Callable[[int], tuple[int, int]]
    ) -> int:
        """Return this rank's fingerprint for exchange `number`. The first exchanges cover inputs and gradients, some
        later ones cover weights, and all others have 0. weights: function that takes the number of the comparison and
        returns the fingerprints of trained and of untrained parameters.
        """
        self._looks = number + 1 < FINGERPRINTED_STEPS
        if number < FINGERPRINTED_STEPS:
            inputs, self._inputs = self._inputs, 0
            fresh, self._inputs_before = inputs != self._inputs_before, inputs
            digest = (inputs >> _HALF & _SEEN or 1) if inputs else 0
            return (_FRESH if digest and fresh else 0) | digest << _HALF | of_gradient(parameters) >> _HALF
        if number % _EVERY:
            return 0
        trained, untrained = weights(number // _EVERY)
        return trained >> _HALF << _HALF | untrained >> _HALF

    def check(
        self, lanes: list[StepMetadata], exchange: Exchange | RestoredExchange, newest: int, loader: str, *, late: bool
    ) -> None:
        """Compare the ranks' metadata of one exchange, and act on every difference. Raises Mismatch if ranks have taken
        different steps.

        newest: number of the exchange launched last. loader: name of the loader whose pass began last. late: whether
        steps have used gradients of earlier steps.
        """
        self.mean_loss = mean_loss(lanes)
        self._ranks.requests.agree(lanes)
        drawn = [lane.drawn for lane in lanes]
        if len(set(drawn)) > 1:
            least, most = drawn.index(min(drawn)), drawn.index(max(drawn))
            members = self._ranks.members
            raise Mismatch(
                f"{exchange.name}: rank {members[most]} has drawn {drawn[most]} batches since its last step and rank"
                f" {members[least]} {drawn[least]}: one of them skipped a step that the other took. Decide such things"
                f" from values that are equal on all ranks, not from a rank's own loss"
            )
        if len(orders := {lane.order for lane in lanes}) > 1 and 0 not in orders:
            self._say(
                f"{loader}: ranks draw its samples in different orders: of a data set that all ranks share, some are"
                " read twice in a pass and others not at all; seed the generator that its sampler, or the split of its"
                " data set, draws from, and let all ranks make the same passes over loaders",
                "warning",
            )
        if exchange.number < FINGERPRINTED_STEPS:
            self._warn_identical(lanes)
        else:
            self._warn_different(lanes)
        if not self.follows and len({lane.groups for lane in lanes}) > 1 and exchange.number > self._agreed:
            # If param_group values differ again in the first exchange after they were made equal, the script sets them
            # at every step.
            self.follows = self._agreed >= 0 and exchange.number == self._agreed + 1
            self._agreed = newest
            self.take_groups(weights=late)

    def take_groups(self, *, weights: bool = False) -> None:
        """Load rank 0's param_group values on all ranks, with a warning. weights: whether to load rank 0's weights and
        optimizer state as well, because steps were already taken with other values."""
        self._say(
            "the ranks' learning rates (or other param_group values) differ, as where each rank sets them by its own"
            " loss, or a scheduler was loaded on rank 0 alone: rank 0's are used on all",
            "warning",
        )
        self._adopt(weights=weights)

    def _warn_identical(self, lanes: list[StepMetadata]) -> None:
        """Warn if ranks seem to train on the same data. Only equal inputs prove this, because gradients are also equal
        if a script averages them itself before its step."""
        inputs = {lane.fingerprint >> _HALF & _SEEN for lane in lanes}
        gradients = {lane.fingerprint & (1 << _HALF) - 1 for lane in lanes}
        are_known, several = 0 not in inputs, len(lanes) > 1
        same_inputs = several and are_known and len(inputs) == 1 and all(lane.fingerprint & _FRESH for lane in lanes)
        same_gradients = several and len(gradients) == 1 and 0 not in gradients
        self._same_inputs = self._same_inputs + 1 if same_inputs else 0
        alone = same_gradients and not same_inputs and not (are_known and len(inputs) > 1)
        self._same_gradients = self._same_gradients + 1 if alone else 0
        if self._same_inputs == _SAME_STEPS:
            targets = "" if same_gradients else ", if their targets are equal, too"
            self._say(
                f"all ranks' models were given equal inputs for {_SAME_STEPS} steps: they train on the same data"
                f"{targets}. Unless that is meant, read it through a DataLoader (see --share), or let each rank choose"
                " its part by RANK",
                "warning",
            )
        elif self._same_gradients == _SAME_STEPS:
            self._say(
                f"all ranks had equal gradients, in all values that were compared, for {_SAME_STEPS} steps before they"
                " were averaged, as where they come from equal data (see --share), or where the script averages them"
                " itself",
                "warning",
            )

    def _warn_different(self, lanes: list[StepMetadata]) -> None:
        if not self._differ and len({lane.fingerprint >> _HALF for lane in lanes}) > 1:
            self._differ = True
            self._say(
                f"the ranks' weights{self._name} differ, though the gradients that were averaged did not, as where a"
                " step draws random numbers or uses a gradient of its rank's own, or weights were set on each rank. See"
                " --verify-every, which says which weights and makes them equal",
                "warning",
            )
        if len({lane.fingerprint & (1 << _HALF) - 1 for lane in lanes}) > 1:
            self._say(
                f"parameters that are not trained{self._name} differ between ranks, as where they were set on each"
                " rank, or a script makes them from others between a forward and its step (a momentum encoder) and"
                " reads predicted weights there, which are each rank's own: then do it right after optimizer.step(), or"
                " use --algorithm sync",
                "warning",
            )
