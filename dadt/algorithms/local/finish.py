"""The end of `local`: all ranks' weights are averaged once more."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from dadt.train.attachment import Attachment


class LocalFinalAverage:
    """The last exact average of all ranks' weights, at the end of the process, if the optimizer still exists on all
    ranks."""

    def __init__(self, attachment: Attachment) -> None:
        # The reference is weak, because the optimizer may be garbage collected long before the end, at a different time
        # on each rank.
        self._attachment = weakref.ref(attachment)
        self._name = f"local, the end{attachment.name}"
        self.rounds = False
        """Whether this rank has taken steps alone."""
        self.trained: list[weakref.ref[torch.Tensor]] = []
        """The optimizer's parameters, still known after the optimizer is garbage collected."""
        self._ranks = attachment.ranks

    def __call__(self) -> None:
        a = self._attachment()
        # Keep the optimizer alive, since it could be garbage collected during the wait.
        optimizer = a._optimizer() if a is not None else None
        mine = a is not None and optimizer is not None and not a.algorithm.averages
        work = self._ranks.allgather(self._name, bytes([mine]))
        self._ranks.wait(work)
        if a is not None and all(lane == b"\x01" for lane in work.lanes):
            algorithm: Any = a.algorithm  # Local, which imports this module
            algorithm.settle()
