"""One exchange: an average of an optimizer's gradients, and of its model's buffers, over all ranks."""

from __future__ import annotations

from functools import partial
from itertools import islice
from time import perf_counter
from typing import cast

import torch
from torch import nn

from dadt._core import Work
from dadt.comm import shards
from dadt.comm.bucket import Bucket, Staged
from dadt.comm.compression import LowRank, Unsent
from dadt.comm.compression.powersgd import Learned, Round
from dadt.comm.executors.device import Averaging
from dadt.errors import Mismatch
from dadt.train.exchange.background import Wait
from dadt.train.exchange.bucket_exchange import BucketExchange, RankLink
from dadt.train.exchange.bucket_plan import BucketPlan
from dadt.train.exchange.sent import SentGradients
from dadt.train.exchange.step_metadata import METADATA_BYTES, StepMetadata, any_flags, pack_flags
from dadt.train.norm import norms, together


class Exchange(BucketExchange):
    """One average over all ranks. Call `launch` for the buckets in order, `close` with this rank's metadata, and then
    `receive`."""

    def __init__(
        self, peers: RankLink, schema: BucketPlan, number: int, name: str, weight: float, *, compressed: bool = True
    ) -> None:
        """compressed: whether gradients are compressed as the bucket plan says, or sent as they are."""
        super().__init__(peers, name)
        self.schema = schema
        self._forms = schema.forms if compressed else [None] * len(schema.buckets)
        self._finished = False
        self.number = number
        self.weight = weight
        self.scale: torch.Tensor | None = None
        """Loss scale by which the gradients are multiplied; None if there is no loss scale."""
        self.frozen: frozenset[int] = frozenset()
        """Ids of parameters that were frozen between the backward and the closing of the exchange."""
        self.waited = 0.0  # seconds spent in `receive`
        self.square = 0.0
        """Squared norm of the averaged gradients, if momentum is sent and ranks know the norm; otherwise 0."""
        schema.next_turn()
        self._turn, self._buffer_turn = schema.turn, schema.buffer_turn
        self._ahead: dict[int, Staged] = {}
        self._delivered: dict[Bucket, list[torch.Tensor]] = {}  # averages copied to a GPU and not yet set as gradients
        self._buffer_works: list[Work | Averaging] = []
        self._ahead_of_step: list[SentGradients] = []
        self._inputs: list[list[torch.Tensor | None]] = []
        """The gradients of each launched bucket, None for parameters without one."""

    @property
    def parameters(self) -> list[torch.Tensor]:
        return self.schema.parameters

    @property
    def launched(self) -> int:
        """Number of gradient buckets launched so far."""
        return len(self._works)

    @property
    def touched(self) -> bool:
        """Whether any gradient was changed or replaced after its bucket was launched ahead of the step."""
        if any(sent.replaced for sent in self._ahead_of_step):
            return True
        if self.schema.on_gpu:
            return self.schema.looks.find(self._ahead_of_step)
        return any(sent.written for sent in self._ahead_of_step)

    @property
    def works(self) -> list[Work | Averaging]:
        return self._buffer_works + super().works

    @property
    def halfway(self) -> bool:
        """Whether low-rank buckets still need their second allreduce, which all ranks launch at the same point."""
        return bool(self._rounds) and not self._second_works

    @property
    def repeatable(self) -> bool:
        """Whether the exchange can be launched again, because its inputs are intact and no low-rank factors were
        computed."""
        places = {view.data_ptr() for bucket in self.schema.buckets for view in bucket.views[self._turn]}
        return not self._rounds and not any(
            t is not None and t.data_ptr() in places for values in self._inputs for t in values
        )

    def give_back(self) -> None:
        """Let the next exchange use this exchange's memory. Call it only for the newest exchange, when it is
        discarded."""
        self.schema.turn = (self._turn - 1) % self.schema.turns
        self.schema.buffer_turn = self._buffer_turn - 1

    def renew(self) -> None:
        super().renew()
        self.schema.__dict__.pop("addresses", None)

    def repeat(self) -> None:
        """Launch the exchange again, with the gradients of the first launch and the buffers' current values."""
        self._delivered.clear()  # averages that include a lost rank are not used
        buffers = iter(self.schema.buffers())
        for bucket in self.schema.buffer_buckets:
            staged = bucket.fill(list(islice(buffers, len(bucket.tensors))), self._buffer_turn)
            if staged.ready is not None:
                staged.ready.synchronize()  # repeated allreduces do not wait for this new copy from the GPU
        super().repeat()

    def tensors_of(self, work: Work | Averaging) -> list[torch.Tensor]:
        """Return the parameters whose gradients this work averages; an empty list if the work does not belong to this
        exchange."""
        index = next((i for i, mine in enumerate(self._works) if mine is work), None)
        return [] if index is None else list(self.schema.buckets[index].tensors)

    def launch_ahead(self) -> None:
        """Submit the next bucket while the script may still change its gradients; `touched` shows later whether it
        has."""
        self._ahead_of_step.append(SentGradients(self.schema.buckets[len(self._works)].tensors, self.number))
        self.launch()

    def launch(self, lane: bytes = b"") -> None:
        """Submit the next bucket's current gradients, which must not change until the operation is done."""
        index = len(self._works)
        staged = self._ahead.pop(index, None) or self._stage(index)
        self._inputs.append(staged.values)
        bucket, lane, scale = self.schema.buckets[index], self._lane(staged) + lane, self._scale_of_sent
        self.submit_bucket(index, bucket, self._forms[index], staged, self._turn, lane, self.weight, scale)

    @property
    def _scale_of_sent(self) -> torch.Tensor | None:
        return self.scale

    def _lane(self, staged: Staged) -> bytes:
        """Return packed flags, one per tensor, that say whether this rank has a value for the tensor."""
        return pack_flags([value is not None for value in staged.values])

    def _stage(self, index: int) -> Staged:
        bucket, form = self.schema.buckets[index], self._forms[index]
        gradients = shards.gradients(bucket.tensors)
        if isinstance(form, Unsent):
            gradients = form.added(bucket, gradients, self.scale)
        if not isinstance(form, LowRank):
            return bucket.stage(gradients, self._turn)
        round_ = form.begin(gradients, self.scale, self._turn, self.weight > 0)
        self._rounds.append((index, round_))
        return round_.staged

    def close(self, lane: StepMetadata) -> None:
        """Submit the buffers and all remaining gradients; the last bucket's allreduce carries this rank's metadata."""
        last = len(self.schema.buckets) - 1
        for index in range(len(self._works), last + 1):
            # Stage all buckets before any launch, so that copies from a GPU run while earlier buckets are exchanged.
            self._ahead[index] = self._stage(index)
        while len(self._works) < last:
            self.launch()
        buffers = iter(self.schema.buffers())
        for i, bucket in enumerate(self.schema.buffer_buckets):
            # A copy of the buffers is averaged, as forwards may change the buffers during the exchange.
            turn = self._buffer_turn
            staged = bucket.fill(list(islice(buffers, len(bucket.tensors))), turn)
            name, flags = f"{self.name}, buffers {i}", self._lane(staged)
            self._enqueue(self._buffer_works, bucket, staged, turn, name, flags, self.weight)
        self.launch(lane.pack())
        # The background thread computes only on host tensors, because on a GPU it would delay the script's own work.
        background = self._peers.background
        if background is not None and self._rounds and all(r.form.bucket.of_host for _, r in self._rounds):
            self._second_works = [
                self._submit_second(i, round_, self._turn, self.weight, held=True) for i, round_ in self._rounds
            ]
            background.begin(partial(self._go_on_held, self._rounds, cast("list[Work]", self._second_works)))

    def _go_on_held(self, rounds: list[tuple[int, Round]], held: list[Work], wait: Wait) -> None:
        """Compute the inputs of the low-rank buckets' second allreduces on the background thread, and release each
        allreduce once its input is complete."""
        for (index, round_), work in zip(rounds, held, strict=True):
            wait(self._works[index])
            round_.halfway()
            self._peers.engine.release(work)

    def receive(self) -> list[StepMetadata]:
        """Wait for all averages and return each rank's metadata. All ranks call this method at the same point."""
        begun = perf_counter()
        lanes = self.wait()
        self._let_go()
        self._inputs.clear()
        rounds, self._rounds = self._rounds, []
        for _, round_ in rounds:
            round_.learn()
        self.waited = perf_counter() - begun
        return lanes

    def wait(self) -> list[StepMetadata]:
        """Wait for all averages without updating the compression's state, so that the exchange can be repeated if ranks
        are lost. A single rank may call this method."""
        self.go_on()
        self._await()
        self._ahead_of_step.clear()  # gradients would otherwise stay alive until the next exchange
        if not self._finished:
            self._finished = True
            for _, round_ in self._rounds:
                round_.finish()
        lanes = [StepMetadata.unpack(data[-METADATA_BYTES:]) for data in self._works[-1].lanes]
        members = self._peers.members
        for rank, lane in zip(members, lanes, strict=True):
            if lane.layout != lanes[0].layout:
                raise Mismatch(
                    f"{self.name}: the parameters or buffers of rank {rank} differ in shape, dtype or number from"
                    f" rank {members[0]}'s: every rank must build the same model"
                )
        return lanes

    def learned(self) -> dict[int, list[Learned]]:
        """Return the compression's pending state updates, by the bucket's index; call this method after `wait`."""
        return {index: round_.learned() for index, round_ in self._rounds}

    def go_on(self) -> None:
        """Launch the second allreduce of low-rank buckets, unless the background thread does so. All ranks call this
        method at the same point."""
        if not self.halfway:
            return
        self._await()
        for _, round_ in self._rounds:
            round_.halfway()
        self._second_works = [self._submit_second(i, round_, self._turn, self.weight) for i, round_ in self._rounds]

    def _await(self) -> None:
        try:
            super()._await()
        except Mismatch as error:
            if "buffers" in str(error):
                raise Mismatch(
                    f"{error}. If a forward gives buffers another shape on each rank: --no-buffers"
                ) from error
            raise

    def norm(self) -> torch.Tensor:
        """Return the common norm of all averages without loss scale, as a tensor with one element. It is equal on all
        ranks up to rounding."""
        flats = [self._brought(b) if b.staged else b.flats[self._turn] for b in self.schema.buckets]
        flats = [torch.view_as_real(f) if f.is_complex() else f for f in flats]
        norm = together(norms(flats))
        return norm if self.scale is None else norm.to(self.scale.device) / self.scale

    def _brought(self, bucket: Bucket) -> torch.Tensor:
        """Return the bucket's averages as one tensor with one dimension, on the parameters' device."""
        places = self._delivered[bucket] = bucket.deliver_all(self._turn)
        return torch.empty(0, dtype=bucket.dtype, device=bucket.device).set_(places[0].untyped_storage())

    def averaged_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the pairs of parameter and averaged gradient, for parameters for which any rank had a gradient."""
        return self._averages()[0]

    def _averages(self) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return the pairs of parameter and average, first for parameters for which any rank had a gradient, and then
        for all others."""
        averages: list[tuple[torch.Tensor, torch.Tensor]] = []
        others: list[tuple[torch.Tensor, torch.Tensor]] = []
        for bucket, work in zip(self.schema.buckets, self._works, strict=True):
            present = any_flags(work.lanes, len(bucket.tensors))
            delivered = self._delivered.pop(bucket, None) or bucket.deliver_all(self._turn)
            for p, average, there in zip(bucket.tensors, delivered, present, strict=True):
                (averages if there else others).append((p, average))
        return averages, others

    @property
    def places(self) -> list[tuple[nn.Module, str]]:
        """Module and buffer name of each averaged buffer."""
        return self.schema.places

    def averaged_buffers(self) -> list[torch.Tensor]:
        """Return the averages of the module buffers in the order of the plan's buckets. They are views, not copies,
        because few are ever read."""
        return [view for bucket in self.schema.buffer_buckets for view in bucket.views[self._buffer_turn]]
