"""Makes FSDP gather weights again after they have changed: FSDP keeps gathered weights after a forward that no backward
follows."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from dadt.comm.shards import gather_anew
from dadt.train.attachment import Attachment
from dadt.train.runtime import Runtime


class GatheredWeights:
    """Decides by the number of steps when FSDP gathers weights again. All ranks that hold one model in parts have the
    same number, while predictions may differ between them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._begun: weakref.WeakKeyDictionary[Attachment, int] = weakref.WeakKeyDictionary()
        """The step before which each optimizer's model had its last training forward."""

    def training_begins(self, attachment: Attachment) -> None:
        """Called at a training forward, before the parameters show predicted weights."""
        if self._is_sharded and self._begun.get(attachment) != attachment.step:
            self._begun[attachment] = attachment.step
            gather_anew(attachment.modules)

    def true_weights(self, attachments: Sequence[Attachment]) -> AbstractContextManager[None]:
        """Return a context for a forward that trains nothing: shows true weights, also those that FSDP gathers."""
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
