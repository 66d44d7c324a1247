"""What a snapshot holds, as it is between two steps."""

from __future__ import annotations

import gc
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from dadt.errors import CommError
from dadt.inject.data.seed import State, Streams
from dadt.inject.replay import variables
from dadt.inject.replay.roster import Roster
from dadt.inject.replay.values import Values
from dadt.train.runtime import Runtime


class Taken:
    """All ranks take it after the same step."""

    def __init__(self, runtime: Runtime, roster: Roster, values: Values, streams: Streams) -> None:
        self._runtime, self._roster, self._values, self._streams = runtime, roster, values, streams

    def take(self, frame: FrameType, *, common: bool) -> dict[str, Any]:
        """A copy on the host of what is this rank's own, and of what all have in common. frame: below the script's.
        Where ranks are lost meanwhile, those that are left do it once more."""
        while True:
            try:
                return self._take(frame, common=common)
            except CommError as error:
                self._runtime.regroup(error)

    def _take(self, frame: FrameType, *, common: bool) -> dict[str, Any]:
        r = self._runtime
        gc.collect()  # what is garbage on some ranks may be none on others
        content: dict[str, Any] = {"step": r.step, "random": self._streams.state() or {"own": State.capture().plain()}}
        content["values"] = self._values.as_tensor()
        # On all ranks: what is one rank's alone gives way to the average.
        with r.checkpoints.by_all():
            optimizers = [optimizer.state_dict() for optimizer in r.optimizers]
        r.show_true_weights()
        tensors = dict(self._roster.tensors())
        content["variables"] = dict(variables.held(frame, tensors.values(), self._roster.attributes()))
        content["counts"] = self._roster.counts()
        if common:
            content["tensors"] = tensors
            content["optimizers"] = optimizers
            content["schedulers"] = [each.state_dict() for each in self._roster.schedulers()]
            content["scalers"] = [each.state_dict() for each in self._roster.scalers()]
        copied = tree_map_only(torch.Tensor, lambda t: t.detach().to("cpu", copy=True), content)
        assert isinstance(copied, dict)
        return copied
