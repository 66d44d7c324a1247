"""One averaging of an optimizer's gradients (and its model's buffers) over all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import islice
from operator import attrgetter
from sys import getrefcount
from time import perf_counter
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from dadt.comm.bucket import Bucket, Staged, split
from dadt.comm.compression import LowRank, forms
from dadt.errors import Mismatch
from dadt.train.exchange.bucket_exchange import BucketExchange, ExchangeRanks
from dadt.train.exchange.sent import Looks, SentGradients
from dadt.train.exchange.step_metadata import METADATA_BYTES, StepMetadata, any_flags, pack_flags
from dadt.train.norm import norms, together
from dadt.train.storage import storage_uses

if TYPE_CHECKING:
    from dadt._core import Work
    from dadt.comm.compression.powersgd import Learned, Round
    from dadt.comm.executors.device import Averaging, Device
    from dadt.train.exchange.background import Wait


_gradient = attrgetter("grad")
_REFERENCES = max(map(getrefcount, [object()]))
"""The reference count of an object that only one list holds."""


class BucketPlan:
    """The buckets of one optimizer's exchanges: gradients, last parameters first, and buffers. Equal on all ranks."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[tuple[nn.Module, str, torch.Tensor]],
        max_bytes: int,
        device: Device | None = None,
        turns: int = 2,
        compression: str = "none",
    ) -> None:
        """device: what averages tensors where they are, if anything does. turns: flat buffers of each bucket; with 1 no
        exchange is under way from one step to the next, and another one is made only where the first is still in use.
        compression: how gradients travel."""
        self.parameters = list(parameters)
        places = {id(b): (m, n) for m, n, b in buffers}
        self.device = device
        direct = None if device is None else device.device
        self.buckets = split(self.parameters[::-1], max_bytes, direct, turns)
        # Gradients of the first parameters come last in a backward: their bucket closes the step.
        # What is shown of these is what came last, while the next averages come.
        self.buffer_buckets = split([b for _, _, b in buffers], max_bytes, direct, max(2, turns))
        self.places = [places[id(b)] for bucket in self.buffer_buckets for b in bucket.tensors]
        """Module and name of each buffer, in the order of their buckets."""
        tensors = [*self.parameters, *(b for _, _, b in buffers)]
        self.crc = zlib.crc32(repr([(tuple(t.shape), str(t.dtype), t.device.type) for t in tensors]).encode())
        self.on_gpu = any(p.is_cuda for p in self.parameters)
        self.looks = Looks()
        self.turns = turns
        self.turn = self.buffer_turn = 0
        self._late = turns > 1
        self._uses: dict[int, list[int]] = {}
        """How many tensors have the memory of a turn's flat buffers, where nobody else does."""
        self.forms = forms(compression, self.buckets)
        """The compression of each bucket of gradients."""

    def compress(self, name: str) -> None:
        """How gradients travel from the next exchange on; what they have lost so far is dropped."""
        self.forms = forms(name, self.buckets)

    def next_turn(self) -> None:
        """Move on to the flat buffers of the next exchange, which begins."""
        self.buffer_turn = (self.buffer_turn + 1) % max(2, self.turns)
        for _ in range(self.turns):
            self.turn = (self.turn + 1) % self.turns
            if self._late or self._is_free(self.turn):
                return
        if self.turns == 1:
            for bucket in self._all_buckets:
                bucket.add_turn()
            self.turns = 2
            self._uses[1] = self._uses_of(1)
            self.__dict__.pop("addresses", None)
        self.turn = (self.turn + 1) % self.turns

    def look_for_moved(self) -> None:
        """Take other memory for places that were given some of their own: the next averages would not lie in them."""
        for bucket in self.buckets:
            for turn in range(self.turns):
                if bucket.has_moved(turn):
                    bucket.renew(turn)
                    self._uses.pop(turn, None)
                    self.__dict__.pop("addresses", None)

    def _uses_of(self, turn: int) -> list[int]:
        return [storage_uses(bucket.views[turn][0].untyped_storage()._cdata) for bucket in self.buckets]

    @property
    def _all_buckets(self) -> list[Bucket]:
        """The buckets of gradients, and those in which low rank sends them."""
        low_ranks = [form for form in self.forms if isinstance(form, LowRank)]
        return [*self.buckets, *(bucket for form in low_ranks for bucket in (form.first, form.second))]

    def _is_free(self, turn: int) -> bool:
        """Whether no `.grad` lies in the turn's flat buffers, as where it is zeroed in place, and the script keeps none
        that did."""
        uses = self._uses_of(turn)
        if uses != self._uses.setdefault(turn, uses):
            return False
        for bucket in self.buckets:
            gradients = [g for g in map(_gradient, bucket.tensors) if g is not None]
            places = set(bucket.pointers[turn])
            if not places.isdisjoint(map(torch.Tensor.data_ptr, filter(_is_strided, gradients))):
                return False
            if max(map(getrefcount, bucket.views[turn])) > _REFERENCES:
                return False
        return True

    @cached_property
    def addresses(self) -> frozenset[int]:
        """The addresses to which averages of gradients come."""
        return frozenset(address for bucket in self.buckets for turn in bucket.pointers for address in turn)

    def buffers(self) -> list[torch.Tensor]:
        """The buffers as they are now, in the order of their buckets: a forward may replace them."""
        now = [module._buffers[name] for module, name in self.places]
        return [b.detach() for b in now if b is not None]

    def forget_residuals(self) -> None:
        """The next exchange starts as the first one did: what compression has lost so far is dropped. On all ranks."""
        for form in self.forms:
            if form is not None:
                form.forget()


class Exchange(BucketExchange):
    """One averaging. `launch` buckets in order, `close` with the lane, then `receive`."""

    def __init__(
        self,
        peers: ExchangeRanks,
        schema: BucketPlan,
        number: int,
        name: str,
        weight: float,
        *,
        compressed: bool = True,
    ) -> None:
        """compressed: as the schema says; otherwise gradients travel as they are."""
        super().__init__(peers, name)
        self.schema = schema
        self._forms = schema.forms if compressed else [None] * len(schema.buckets)
        self._finished = False
        self.number = number
        self.weight = weight
        self.scale: torch.Tensor | None = None
        """The loss scale that the gradients carry."""
        self.frozen: frozenset[int] = frozenset()
        """Parameters, by id, that were frozen when it was closed, behind the backward that made their gradients."""
        self.waited = 0.0  # seconds in `receive`
        schema.next_turn()
        self._turn, self._buffer_turn = schema.turn, schema.buffer_turn
        self._ahead: dict[int, Staged] = {}
        self._delivered: dict[Bucket, list[torch.Tensor]] = {}  # averages brought to a GPU, and not handed out yet
        self._buffer_works: list[Work | Averaging] = []
        self._ahead_of_step: list[SentGradients] = []
        self._inputs: list[list[torch.Tensor | None]] = []
        """The gradients of each bucket that was launched."""

    @property
    def parameters(self) -> list[torch.Tensor]:
        return self.schema.parameters

    @property
    def launched(self) -> int:
        """How many buckets of gradients are launched."""
        return len(self._works)

    @property
    def touched(self) -> bool:
        """Whether a gradient was changed or replaced after its bucket was launched ahead."""
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
        """Whether its second half is to begin by `go_on`, at the same place on all ranks."""
        return bool(self._rounds) and not self._second_works

    @property
    def repeatable(self) -> bool:
        """Whether its inputs outlast a failure: no average is written over them, and none was made of them already."""
        places = {view.data_ptr() for bucket in self.schema.buckets for view in bucket.views[self._turn]}
        return not self._rounds and not any(
            t is not None and t.data_ptr() in places for values in self._inputs for t in values
        )

    def give_back(self) -> None:
        """Let the next exchange have its flat buffers: it was begun last, and in vain."""
        self.schema.turn = (self._turn - 1) % self.schema.turns
        self.schema.buffer_turn = self._buffer_turn - 1

    def renew(self) -> None:
        super().renew()
        self.schema.__dict__.pop("addresses", None)

    def repeat(self) -> None:
        """Buffers are averaged as they are now."""
        self._delivered.clear()  # averages over a rank that is lost
        buffers = iter(self.schema.buffers())
        for bucket in self.schema.buffer_buckets:
            staged = bucket.fill(list(islice(buffers, len(bucket.tensors))), self._buffer_turn)
            if staged.ready is not None:
                staged.ready.synchronize()  # what is launched again knows of the copies before
        super().repeat()

    def tensors_of(self, work: Work | Averaging) -> list[torch.Tensor]:
        """The parameters whose gradients it moves; none if it is not one of these works."""
        index = next((i for i, mine in enumerate(self._works) if mine is work), None)
        return [] if index is None else list(self.schema.buckets[index].tensors)

    def launch_ahead(self) -> None:
        """Like `launch`, while the script may still change the gradients: `touched` says whether it has."""
        self._ahead_of_step.append(SentGradients(self.schema.buckets[len(self._works)].tensors, self.number))
        self.launch()

    def launch(self, lane: bytes = b"") -> None:
        """Submit the next bucket's gradients as they are now. They must not change until the work is done."""
        index = len(self._works)
        staged = self._ahead.pop(index, None) or self._stage(index)
        self._inputs.append(staged.values)
        bucket, lane = self.schema.buckets[index], self._lane(staged) + lane
        self.submit_bucket(index, bucket, self._forms[index], staged, self._turn, lane, self.weight, self.scale)

    def _lane(self, staged: Staged) -> bytes:
        """Flags of the tensors that this rank has."""
        return pack_flags([value is not None for value in staged.values])

    def _stage(self, index: int) -> Staged:
        bucket, form = self.schema.buckets[index], self._forms[index]
        gradients = [t.grad for t in bucket.tensors]
        if not isinstance(form, LowRank):
            return bucket.stage(gradients, self._turn)
        round_ = form.begin(gradients, self.scale, self._turn, self.weight > 0)
        self._rounds.append((index, round_))
        return round_.staged

    def close(self, lane: StepMetadata) -> None:
        """Submit buffers and all gradients that are left; the last bucket carries the lane."""
        last = len(self.schema.buckets) - 1
        for index in range(len(self._works), last + 1):
            # Copies from a GPU run while the buckets before are under way.
            self._ahead[index] = self._stage(index)
        while len(self._works) < last:
            self.launch()
        buffers = iter(self.schema.buffers())
        for i, bucket in enumerate(self.schema.buffer_buckets):
            # Forwards go on while this is under way: average a copy, made in the place of delivery.
            turn = self._buffer_turn
            staged = bucket.fill(list(islice(buffers, len(bucket.tensors))), turn)
            name, flags = f"{self.name}, buffers {i}", self._lane(staged)
            self._enqueue(self._buffer_works, bucket, staged, turn, name, flags, self.weight)
        self.launch(lane.pack())
        # A GPU's computations here would be in the way of the script's own.
        background = self._peers.background
        if background is not None and self._rounds and all(r.form.bucket.of_host for _, r in self._rounds):
            self._second_works = [
                self._submit_second(i, round_, self._turn, self.weight, held=True) for i, round_ in self._rounds
            ]
            background.begin(partial(self._go_on_held, self._rounds, cast("list[Work]", self._second_works)))

    def _go_on_held(self, rounds: list[tuple[int, Round]], held: list[Work], wait: Wait) -> None:
        """Go on with the second rounds, in the background."""
        for (index, round_), work in zip(rounds, held, strict=True):
            wait(self._works[index])
            round_.halfway()
            self._peers.engine.release(work)

    def receive(self) -> list[StepMetadata]:
        """Wait until all is averaged. Returns the lanes by rank. All ranks come here between the same two exchanges."""
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
        """Like `receive`, for one rank alone, and changes nothing: compression learns nothing of it yet, and it can be
        repeated, as where ranks are lost and others have not waited for it."""
        self.go_on()
        self._await()
        self._ahead_of_step.clear()  # else the gradients stay until the next exchange
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
        """Call it after `wait`: what compression will learn in `receive`, by the number of the bucket."""
        return {index: round_.learned() for index, round_ in self._rounds}

    def go_on(self) -> None:
        """Begin the second half of what takes two allreduces, if it does not by itself. Every rank comes here between
        the same two exchanges."""
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
        """The norm of all averages, without their loss scale; equal on all ranks but for rounding. One element."""
        flats = [self._brought(b) if b.staged else b.flats[self._turn] for b in self.schema.buckets]
        flats = [torch.view_as_real(f) if f.is_complex() else f for f in flats]
        norm = together(norms(flats))
        return norm if self.scale is None else norm.to(self.scale.device) / self.scale

    def _brought(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's averages as one tensor, on the parameters' device."""
        places = self._delivered[bucket] = bucket.deliver_all(self._turn)
        return torch.empty(0, dtype=bucket.dtype, device=bucket.device).set_(places[0].untyped_storage())

    def averaged_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters and their averages, of those for which any rank had a gradient."""
        averages = []
        for bucket, work in zip(self.schema.buckets, self._works, strict=True):
            present = any_flags(work.lanes, len(bucket.tensors))
            delivered = self._delivered.pop(bucket, None) or bucket.deliver_all(self._turn)
            averages += [(p, delivered[i]) for i, p in enumerate(bucket.tensors) if present[i]]
        return averages

    @property
    def places(self) -> list[tuple[nn.Module, str]]:
        """Module and name of each averaged buffer."""
        return self.schema.places

    def averaged_buffers(self) -> list[torch.Tensor]:
        """The buffers' averages where they have come, in the order of the schema's buckets: few are ever looked at."""
        return [view for bucket in self.schema.buffer_buckets for view in bucket.views[self._buffer_turn]]


def _is_strided(gradient: torch.Tensor) -> bool:
    return gradient.layout == torch.strided


def hand_out(
    parameters: Sequence[torch.Tensor],
    averages: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ratio: torch.Tensor | float | None,
    used: frozenset[int] = frozenset(),
) -> None:
    """Make each average its parameter's `.grad`, multiplied with `ratio`; None for those of `parameters` without. used:
    frozen ones, by id, that were so already when their gradients were taken."""
    # Frozen since: the script expects it to stay where it is.
    given = [(p, gradient) for p, gradient in averages if p.requires_grad or id(p) in used]
    if ratio is not None and given:
        for device in {gradient.device for _, gradient in given}:
            here = ratio.to(device) if isinstance(ratio, torch.Tensor) else ratio
            torch._foreach_mul_([gradient for _, gradient in given if gradient.device == device], here)
    ids = {id(p) for p, _ in given}
    for p in parameters:
        if id(p) not in ids:
            p.grad = None
    for p, gradient in given:
        sparse = p.grad is not None and p.grad.layout == torch.sparse_coo
        p.grad = gradient.to_sparse(1) if sparse else gradient
