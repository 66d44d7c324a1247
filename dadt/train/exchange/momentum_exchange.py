"""An exchange that averages the optimizer's next momentum in place of gradients."""

from __future__ import annotations

import torch

from dadt.comm import shards
from dadt.comm.bucket import Bucket, Staged
from dadt.train.exchange.bucket_exchange import RankLink
from dadt.train.exchange.bucket_plan import BucketPlan
from dadt.train.exchange.exchange import Exchange
from dadt.train.exchange.step_metadata import StepMetadata, mean_square, pack_flags
from dadt.train.idle_momentum import Sent
from dadt.train.momentum import Momentum


class MomentumExchange(Exchange):
    """Sends the optimizer's next momentum without loss scale, and delivers the gradients by which the optimizer obtains
    the mean momentum."""

    def __init__(
        self, peers: RankLink, schema: BucketPlan, number: int, name: str, weight: float, momentum: Momentum
    ) -> None:
        super().__init__(peers, schema, number, name, weight)
        self._momentum = momentum
        self._norm: torch.Tensor | None = None
        self._sent: Sent | None = None
        """What the averages counted on; None until they have arrived."""
        self._changed: set[Bucket] = set()
        """Buckets whose memory contains gradients, computed in place from the mean momentum."""
        self._flags: dict[int, bytes] = {}
        """For each bucket, by the id of its staged values, packed flags that say for which tensors this rank has a
        gradient."""

    @property
    def _scale_of_sent(self) -> None:
        return None

    def _stage(self, index: int) -> Staged:
        bucket = self.schema.buckets[index]
        gradients = shards.gradients(bucket.tensors)
        staged = self._momentum.stage(bucket, gradients, self._turn, self.scale, keeps=self.schema.late)
        self._flags[id(staged.values)] = pack_flags([g is not None for g in gradients])
        return staged

    def _lane(self, staged: Staged) -> bytes:
        return self._flags.get(id(staged.values)) or super()._lane(staged)

    def wait(self) -> list[StepMetadata]:
        lanes = super().wait()
        self.square = mean_square(lanes)
        return lanes

    def norm(self) -> torch.Tensor:
        """Return the norm of the mean momentum, because the gradients computed from it contain many times its noise."""
        if self._norm is None:
            scale, self.scale = self.scale, None
            self._norm = super().norm()
            self.scale = scale
        return self._norm

    def averaged_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if self.schema.late:
            self.norm()  # the norm is computed before the memory changes
        averages, idle = self._averages()
        if self._sent is None:
            self._sent = self._momentum.arrived(averages, idle)
        fresh = {id(t): bucket for bucket in self.schema.buckets if bucket not in self._changed for t in bucket.tensors}
        self._momentum.to_gradients([(p, mean) for p, mean in averages if id(p) in fresh], self.scale, self._sent)
        self._changed.update(bucket for bucket in fresh.values() if not bucket.staged)
        return averages
