"""State that is common to ranks training apart: anchors, the outer optimizer that moves them, parts of a model."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch

from dadt.comm.bucket import Bucket, split
from dadt.comm.compression import LowRank, forms
from dadt.errors import CommError, Mismatch
from dadt.train.exchange.bucket_exchange import BucketExchange, ExchangeRanks

if TYPE_CHECKING:
    from dadt._core import Work
    from dadt.comm.executors.device import Averaging

_OWN, _MEAN = 0, 1
"""The bucket's flat buffers: what this rank sends, and what comes."""
_LANE = struct.Struct("<IIII")


class Told(NamedTuple):
    """Numbers that each rank sends to the others in the same exchange."""

    layout: int
    """crc32 of the anchors' shapes and dtypes."""
    number: int
    """Exchanges of this fragment so far; modulo 2**32 on the way."""
    settles: int
    """1 where weights are averaged, 0 where a round's progress is."""
    groups: int
    """crc32 of the optimizer's param_group values."""


class Outer:
    """SGD with Nesterov momentum on what a round has changed, as torch.optim.SGD computes it (arXiv:2311.08105)."""

    def __init__(self, lr: float, momentum: float) -> None:
        self.lr = lr
        self.momentum = momentum

    def velocity(self, before: torch.Tensor | None, progress: torch.Tensor) -> torch.Tensor | None:
        return None if before is None else before.mul(self.momentum).add_(progress)

    def moved(
        self, anchor: torch.Tensor, velocity: torch.Tensor | None, progress: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Anchor and velocity after one step. velocity: None where there is no momentum."""
        after = self.velocity(velocity, progress)
        step = progress if after is None else progress.add(after, alpha=self.momentum)
        return anchor.add(step, alpha=self.lr), after


class OuterRow(NamedTuple):
    """One parameter, its anchor and its outer momentum (None: there is none). For parameters of 16 bits the anchor and
    what is sent have 32: a round's progress would drown in rounding."""

    parameter: torch.Tensor
    anchor: torch.Tensor
    velocity: torch.Tensor | None


class Fragment(BucketExchange):
    """Parameters that are exchanged together: `send` begins an exchange, `receive` and `merge` end it, later.

    While one is in flight, a rank goes on from where its own progress alone would lead the anchor; what it has added to
    that by then stays its own, on top of the anchor that all have moved together.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[torch.Tensor],
        outer: Outer,
        peers: ExchangeRanks,
        regroup: Callable[[CommError], None],
        bucket_bytes: int,
        compression: str = "none",
    ) -> None:
        """Begins a round at the parameters' values, which are the same on all ranks.

        regroup: goes on with the ranks that are left after this error; has called `repeat` or `take` then where an
        exchange was under way. compression: how progress travels.
        """
        super().__init__(peers, name)
        self.outer = outer
        self._regroup = regroup
        self.sent = Told(0, 0, 0, 0)
        """The numbers that this rank sent in its newest exchange."""
        self.over = 0
        """Exchanges of this fragment that have ended on this rank."""
        self.absorbed = False
        """The last of them has changed the velocity only, as weights are averaged at once behind it."""
        self.differ = False
        """Whether the ranks' param_group values differed in the last of them."""
        self.replaced = False
        """The script has set the weights since the last exchange: the next one settles them."""
        with torch.no_grad():
            rows = [OuterRow(p, a := _wide(p), torch.zeros_like(a) if outer.momentum else None) for p in parameters]
        self._buckets = split(
            [r.anchor for r in rows], bucket_bytes, None if peers.device is None else peers.device.device
        )
        self._forms = forms(compression, self._buckets)
        by_anchor = {id(r.anchor): r for r in rows}
        self._rows = [[by_anchor[id(a)] for a in bucket.tensors] for bucket in self._buckets]
        self.rows = {id(r.parameter): r for r in rows}
        self._layout = zlib.crc32(repr([(tuple(r.anchor.shape), str(r.anchor.dtype)) for r in rows]).encode())

    @property
    def size(self) -> int:
        """Bytes of one exchange, uncompressed."""
        return sum(a.numel() * a.element_size() for bucket in self._buckets for a in bucket.tensors)

    @property
    def under_way(self) -> bool:
        """Whether an exchange is not merged yet."""
        return self.sent.number > self.over

    def tensors_of(self, work: Work | Averaging) -> list[torch.Tensor]:
        """The parameters that it moves; none if it is not one of these works."""
        index = next((i for i, mine in enumerate(self._works) if mine is work), None)
        return [] if index is None else [r.parameter for r in self._rows[index]]

    # One exchange ----------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Wait for what is in flight."""
        while True:
            try:
                self._await()
                self._go_on()
                break
            except CommError as error:
                self._regroup(error)
        self._let_go()
        if not self._works:
            return
        told = [Told(*_LANE.unpack(lane[-_LANE.size :])) for lane in self._works[-1].lanes]
        for rank, theirs in enumerate(told):
            if theirs[:3] != told[0][:3]:
                cause = "the ranks do not run the same steps"
                if theirs.settles != told[0].settles:
                    cause = "load_state_dict() was not called on all of them"
                raise Mismatch(f"{self._works[-1].name}: rank 0 {_told(told[0])}, rank {rank} {_told(theirs)}: {cause}")
        self.differ = len({each.groups for each in told}) > 1

    def merge(self) -> None:
        """Move the anchor by the mean of what the ranks sent. Call it after `receive`. Nothing is done where a loss of
        ranks has brought the merged anchor."""
        if not self._works:
            return
        with torch.no_grad():
            for bucket, i, row in self._places():
                unsent = row.parameter.data.to(row.anchor) - self._start(bucket, i, row)
                anchor, velocity = self.outer.moved(row.anchor, row.velocity, bucket.deliver(i, _MEAN))
                row.anchor.copy_(anchor)
                if row.velocity is not None and velocity is not None:
                    row.velocity.copy_(velocity)
                row.parameter.data.copy_(unsent.add_(row.anchor))
        self._end()

    def _end(self, *, absorbed: bool = False) -> None:
        self._works, self._second_works, self._rounds = [], [], []
        self.over, self.absorbed = self.sent.number, absorbed

    def send(self, groups: int) -> None:
        """Launch this rank's progress from the anchor, after `merge`. Does not wait for the others'."""
        with torch.no_grad():
            for bucket, i, row in self._places():
                progress = row.parameter.data.to(row.anchor) - row.anchor
                bucket.views[_OWN][i].copy_(progress, non_blocking=True)
                ahead, _ = self.outer.moved(row.anchor, row.velocity, progress)
                row.parameter.data.copy_(ahead)
        self._send(groups, settles=False)

    def settle(self, groups: int) -> None:
        """Set weights to their mean over all ranks, now, and begin a round there. What low rank has lost of progress
        goes with them, as there is no next round with which it could. (By 8 or 16 bits it is a thousandth.)"""
        self.receive()
        if self._works and not self.replaced and any(isinstance(form, LowRank) for form in self._forms):
            self.merge()  # what is owed is what this has left out
        absorbs = bool(self._works)
        with torch.no_grad():
            for bucket, rows, form in zip(self._buckets, self._rows, self._forms, strict=True):
                for i, row in enumerate(rows):
                    if row.velocity is not None and self.replaced:
                        row.velocity.zero_()
                    elif row.velocity is not None and self._works:
                        row.velocity.mul_(self.outer.momentum).add_(bucket.deliver(i, _MEAN))
                    own = row.parameter.data
                    owed = form.owes(i) if isinstance(form, LowRank) and not self.replaced else None
                    if owed is not None:
                        own = own.to(row.anchor).add(owed, alpha=self.outer.lr * (1 + self.outer.momentum))
                    bucket.views[_OWN][i].copy_(own, non_blocking=True)
        if absorbs:
            self._end(absorbed=True)
        self._send(groups, settles=True)
        self.receive()
        if self._works:
            with torch.no_grad():
                for bucket, i, row in self._places():
                    row.anchor.copy_(bucket.deliver(i, _MEAN))
                    row.parameter.data.copy_(row.anchor)
            self._end()
        self.replaced = False
        self.forget_residuals()

    # Where ranks are lost --------------------------------------------------------------------------------------

    def forget_residuals(self) -> None:
        for form in self._forms:
            if form is not None:
                form.forget()

    def state(self) -> list[torch.Tensor]:
        """Anchors and velocities: they are the same on all ranks that have ended as many exchanges."""
        return [t for _, _, row in self._places() for t in (row.anchor, row.velocity) if t is not None]

    def take(self, state: Sequence[torch.Tensor], *, absorbed: bool, differ: bool) -> None:
        """End the exchange under way with the `state` of a rank that has ended it; absorbed, differ: that rank's."""
        values = iter(state)
        with torch.no_grad():
            for bucket, i, row in self._places():
                unsent = row.parameter.data.to(row.anchor) - self._start(bucket, i, row)
                row.anchor.copy_(next(values))
                if row.velocity is not None:
                    row.velocity.copy_(next(values))
                if self.sent.settles:
                    row.parameter.data.copy_(row.anchor)
                elif not (absorbed or self.replaced):
                    row.parameter.data.copy_(unsent.add_(row.anchor))
        self._end(absorbed=absorbed)
        self.differ = differ

    def repeat(self) -> None:
        """Launch once more what is under way, on the connection of another group."""
        self._works, self._second_works, self._rounds = [], [], []
        self._submitted.clear()
        self._launch_all()

    def resumed(self) -> Iterator[tuple[OuterRow, torch.Tensor, torch.Tensor | None]]:
        """For each parameter, anchor and velocity as if all ranks had made this one's progress in what is in flight."""
        for bucket, i, row in self._places():
            anchor, velocity = self._start(bucket, i, row), row.velocity
            if self.replaced:
                anchor, velocity = _wide(row.parameter), None if velocity is None else torch.zeros_like(velocity)
            elif self._works:
                velocity = self.outer.velocity(velocity, bucket.deliver(i, _OWN))
            yield row, anchor, velocity

    def _places(self) -> Iterator[tuple[Bucket, int, OuterRow]]:
        """Each row with its bucket, and its place there."""
        for bucket, rows in zip(self._buckets, self._rows, strict=True):
            for i, row in enumerate(rows):
                yield bucket, i, row

    def _start(self, bucket: Bucket, index: int, row: OuterRow) -> torch.Tensor:
        """The weights at which this rank's round began: computed again, the same bits, rather than kept."""
        if not self._works:
            return row.anchor
        start, _ = self.outer.moved(row.anchor, row.velocity, bucket.deliver(index, _OWN))
        return start.to(row.parameter.dtype).to(start.dtype)

    def _send(self, groups: int, *, settles: bool) -> None:
        self.sent = Told(self._layout, self.sent.number + 1, settles, groups)
        self.began = perf_counter()
        self._works, self._second_works = [], []
        self._launch_all()

    def _launch_all(self) -> None:
        told = _LANE.pack(*self.sent._replace(number=self.sent.number % 2**32))
        last = len(self._buckets) - 1
        for index in range(last + 1):
            self._launch(index, told if index == last else b"", settles=bool(self.sent.settles))

    def _launch(self, index: int, lane: bytes, *, settles: bool) -> None:
        bucket, form = self._buckets[index], None if settles else self._forms[index]
        if isinstance(form, LowRank):
            round_ = form.begin([bucket.deliver(i, _OWN) for i in range(len(bucket.tensors))], None, _MEAN)
            self._rounds.append((index, round_))
            self.submit_bucket(index, bucket, form, round_.staged, _MEAN, lane)
        else:
            self.submit_bucket(index, bucket, form, bucket.stage(bucket.views[_OWN], _OWN), _MEAN, lane)

    def _go_on(self) -> None:
        """Begin and await the second allreduce of buckets that take two. Every rank comes here at the same step."""
        rounds, self._rounds = self._rounds, []
        for _, round_ in rounds:
            round_.halfway()
        self._second_works = [self._submit_second(index, round_, _MEAN) for index, round_ in rounds]
        self._await()
        for _, round_ in rounds:
            round_.finish()
            round_.learn()


def parts(parameters: Sequence[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    """Split tensors in their order into `count` parts of about equal bytes, some of which may be empty."""
    sizes = [p.numel() * p.element_size() for p in parameters]
    total = sum(sizes) or 1
    found: list[list[torch.Tensor]] = [[] for _ in range(count)]
    before = 0
    for p, size in zip(parameters, sizes, strict=True):
        found[min(count - 1, (2 * before + size) * count // (2 * total))].append(p)
        before += size
    return found


def _wide(parameter: torch.Tensor) -> torch.Tensor:
    """A copy, of 32 bits at least, with the parameter's order in memory."""
    narrow = parameter.dtype in (torch.float16, torch.bfloat16)
    wide = torch.empty_like(parameter.data, dtype=torch.float32 if narrow else parameter.dtype)
    return wide.copy_(parameter.data)


def _told(told: Told) -> str:
    what = "averages weights" if told.settles else "sends a round's progress"
    return f"{what}, exchange {told.number} of parameters {told.layout:08x}"
