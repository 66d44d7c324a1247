"""Synchronous data-parallel training: each step applies its own averaged gradients. Averaging overlaps with the
backward pass."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from dadt.train.algorithm import Algorithm
from dadt.train.attachment import Attachment
from dadt.train.exchange.exchange import Exchange


class Sync(Algorithm):
    """w(t+1) = optimizer(w(t), mean of g(t)).

    The number of times that backward passes add to each gradient is learned from the last two steps. If these two steps
    and all ranks agree, a bucket is sent during the backward pass that completes it. If a gradient changes after that
    (by another backward, or by the script), a flag in the exchange's metadata makes all ranks exchange again, and then
    send no bucket early for some steps.
    """

    survives = True
    in_flight = 0

    attachment: Attachment

    def __init__(self, attachment: Attachment, *, watches: bool = False) -> None:
        """watches: whether to count from the start how often backward passes add to each gradient, instead of waiting
        until a step shows that this is useful."""
        super().__init__(attachment)
        self.wants_gradients = watches
        self._overlap = Overlap()
        self._exchange: Exchange | None = None
        """This step's exchange, once a backward pass or `before_step` has started one; otherwise None."""
        self._holds = False

    def gradient_ready(self, parameter: torch.Tensor) -> None:
        a = self.attachment
        if not a.overlaps:
            return
        overlap = self._overlap
        overlap.count(parameter)
        while overlap.expected:
            if self._exchange is None and not a.schema_is_current:
                return
            buckets, launched = a.schema.buckets, self._exchange.launched if self._exchange else 0
            # The last bucket is sent at the optimizer's step, since it carries the metadata by which ranks agree.
            if launched >= len(buckets) - 1 or not overlap.complete(buckets[launched].tensors):
                return
            # The exchange is created only when its first bucket is complete, because it counts all batches of the step.
            self._exchange = self._exchange or a.new_exchange()
            self._exchange.launch_ahead()

    def before_step(self) -> None:
        a = self.attachment
        exchange = self._exchange = self._exchange or a.new_exchange()
        growth = self._overlap.growth(exchange.schema.parameters)
        # If the trained parameters have changed since a backward pass started the exchange, the exchange is repeated.
        a.close(exchange, growth=growth, redo=exchange.touched or exchange.schema is not a.schema)
        lanes = exchange.receive()
        agreed = len({lane.growth for lane in lanes}) == 1
        in_vain = any(lane.redo for lane in lanes)
        self._exchange = None
        if a.weighing.agree(lanes) or in_vain:
            exchange = a.new_exchange(again=True)
            a.close(exchange)
            lanes = exchange.receive()
        a.agree(lanes, exchange)
        self._holds = not a.finite.judge(lanes, exchange)
        if self._holds:
            a.zero_gradients()
        else:
            a.deliver(exchange)
        self._overlap.step(agreed, in_vain)
        # a single bucket is always sent at the optimizer's step, so watching gradients would be useless
        if not self.wants_gradients and len(exchange.schema.buckets) > 1:
            self.wants_gradients = True
            a.watch_gradients()

    def after_step(self) -> None:
        self._holds = False

    @property
    def launched(self) -> Exchange | None:
        return self._exchange

    def regroup(self, behind: bool, keep: bool) -> None:
        self._exchange = None
        self._overlap = Overlap()
        if behind:
            self._holds = True
            self.attachment.zero_gradients()

    @property
    def holds(self) -> bool:
        return self._holds

    def observe(self) -> dict[str, Any]:
        return {"watches": self.wants_gradients, **self._overlap.observe(self.attachment.parameters)}

    def load_state(self, state: dict[str, Any]) -> None:
        # Predicted weights are needed only with late averages, and the ranks have permanently returned to synchronous
        # steps.
        self.attachment.prediction.end()

    def restore(self, own: dict[str, Any]) -> None:
        if not own:
            return
        self._overlap.restore(own, self.attachment.parameters)
        if own["watches"] and not self.wants_gradients:
            self.wants_gradients = True
            self.attachment.watch_gradients()


class Overlap:
    """Counts how often backward passes add to each parameter's gradient in a step, to know when the gradient is
    complete."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        """Number of times that backward passes have added to each gradient in this step, by the parameter's id."""
        self._before: dict[int, int] = {}
        self.expected: dict[int, int] = {}
        self._pause = 1
        self._left = 0

    def count(self, parameter: torch.Tensor) -> None:
        self._counts[id(parameter)] = self._counts.get(id(parameter), 0) + 1

    def observe(self, parameters: list[torch.Tensor]) -> dict[str, Any]:
        """Return the counts for a snapshot, in lists in the order of `parameters`."""
        before, expected = ([each.get(i) for i in map(id, parameters)] for each in (self._before, self.expected))
        return {"before": before, "expected": expected, "pause": self._pause, "left": self._left}

    def restore(self, state: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """Restore the counts of a snapshot. state: the value that `observe` returned."""
        self._before, self.expected = (
            {id(p): count for p, count in zip(parameters, state[name], strict=False) if count is not None}
            for name in ("before", "expected")
        )
        self._pause, self._left = state["pause"], state["left"]

    def complete(self, parameters: list[torch.Tensor]) -> bool:
        return all(self._counts.get(i, 0) == self.expected.get(i, 0) for i in map(id, parameters))

    def growth(self, parameters: list[torch.Tensor]) -> int:
        return zlib.crc32(bytes(min(self._counts.get(i, 0), 255) for i in map(id, parameters)))

    def step(self, agreed: bool, in_vain: bool) -> None:
        """Decide whether later steps may send buckets during backward passes. Called after each step. agreed: whether
        backward passes added to each gradient equally often on all ranks, so that all ranks can send buckets early.
        in_vain: whether a gradient that was sent early changed afterwards on some rank, so that the exchange was
        repeated. A script that causes this in every step would exchange everything twice and lose the compression's
        residuals; so after each time nothing is sent early for a number of steps, which doubles each time.
        """
        if in_vain:
            self._pause *= 2
            self._left = self._pause
        elif self._left:
            self._left -= 1
        learned = agreed and not self._left and self._counts == self._before
        self.expected = self._counts if learned else {}
        self._before, self._counts = self._counts, {}
