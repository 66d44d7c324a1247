"""Counts the batches that shared data loaders return to the script, because each rank's gradient is weighted by their
sizes."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from dadt.train.attachment import Attachment
from dadt.train.attachments import Attachments
from dadt.train.batch_weight import BatchWeight, Pass
from dadt.train.optimizers import Optimizers
from dadt.train.ranks import Ranks
from dadt.train.replay_state import ReplayState


class DrawnBatches:
    """Reports each batch that the script draws from a shared loader to the optimizers that train on it."""

    def __init__(self, ranks: Ranks, optimizers: Optimizers, attachments: Attachments, replay: ReplayState) -> None:
        self._ranks, self._optimizers, self._attachments, self._replay = ranks, optimizers, attachments, replay
        self._kept: weakref.WeakKeyDictionary[torch.optim.Optimizer, BatchWeight] = weakref.WeakKeyDictionary()
        """Batch weights of optimizers that are not attached to DADT at the moment, since the script may already have
        drawn batches for their next step."""
        self.missing: Callable[[int], str] = lambda lost: f"data of {lost} of {ranks.world.world_size} is left out"
        """Function that returns a text that says what happens to the data of a given number of lost workers."""

    def drew(self, source: Pass, samples: int, nominal: int) -> None:
        """Record a training batch that a loader returns to the script. A batch read on a thread that trains no
        optimizer belongs to no known step, so it does not change the weight of a step."""
        self._ranks.progress.samples += samples
        if self._optimizers.script.on_training_thread:
            self._optimizers.one_batch.drew(source, samples)
            for weight in self._weights:
                weight.drew(source, samples, nominal)

    def pass_over(self, source: Pass) -> None:
        """Record that the script has reached the end of a pass over a shared loader."""
        source.is_over = True
        if self._optimizers.script.on_training_thread:
            for weight in self._weights:
                weight.pass_over(source)

    @property
    def _weights(self) -> list[BatchWeight]:
        if not self._replay.under_way:
            return [attachment.batch_weight for attachment in self._attachments]
        script = self._optimizers.script
        for optimizer in self._optimizers:
            self._kept.setdefault(optimizer, BatchWeight(lambda: script.backwards))
        return list(self._kept.values())

    def trained_before(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark the drawn batches as trained on. Called during a replay of the script, at each step that the original
        run took with this optimizer."""
        if (weight := self._kept.get(optimizer)) is not None:
            weight.exchanged()
            weight.stepped()

    def keep(self, attachment: Attachment) -> None:
        """Store the batch weight of an optimizer that is detached from DADT, for the time when it is attached again."""
        self._kept[attachment.optimizer] = attachment.batch_weight

    def attach(self, attachment: Attachment) -> None:
        """Give a new attachment the batch weight that `keep` has stored for its optimizer, if there is one."""
        attachment.batch_weight = self._kept.pop(attachment.optimizer, attachment.batch_weight)
