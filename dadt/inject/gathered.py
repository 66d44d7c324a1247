"""Makes FSDP gather weights again after they have changed, because FSDP keeps using gathered weights after a forward
that no backward follows."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from dadt.comm.shards import gather_anew
from dadt.train.attachment import Attachment
from dadt.train.runtime import Runtime


class GatheredWeights:
    """Decides when FSDP gathers weights again. The decision depends only on the number of steps, which is the same on
    all ranks that store parts of one model; whether predicted weights are shown may differ between these ranks."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._begun: weakref.WeakKeyDictionary[Attachment, int] = weakref.WeakKeyDictionary()
        """For each optimizer, the number of steps taken before the latest training forward of its model."""

    def training_begins(self, attachment: Attachment) -> None:
        """Called when a training forward begins, before parameters are replaced by predicted weights: make FSDP gather
        again at the first one of a step."""
        if self._is_sharded and self._begun.get(attachment) != attachment.step:
            self._begun[attachment] = attachment.step
            gather_anew(attachment.modules)

    def true_weights(self, attachments: Sequence[Attachment]) -> AbstractContextManager[None]:
        """Return a context for a forward that is not part of training, in which the model has true weights, not
        predicted ones, even in what FSDP gathers."""
        shown = self._runtime.prediction_scope.true_weights([a.prediction for a in attachments])
        return self._gathered(shown, attachments) if self._is_sharded else shown

    @contextmanager
    def _gathered(self, shown: AbstractContextManager[None], attachments: Sequence[Attachment]) -> Iterator[None]:
        between = [a for a in attachments if self._begun.get(a) == a.step]
        for attachment in between:
            gather_anew(attachment.modules)
        try:
            with shown:
                yield
        finally:
            for attachment in between:
                gather_anew(attachment.modules)

    @property
    def _is_sharded(self) -> bool:
        return self._runtime.ranks.world.parts > 1
