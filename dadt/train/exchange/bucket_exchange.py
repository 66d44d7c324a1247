"""Submits the allreduces of one exchange's buckets, waits for them, and keeps the memory alive that they use."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, Protocol

import torch

from dadt._core import Engine, Work
from dadt.comm.bucket import Bucket, Staged
from dadt.comm.compression import Feedback, Form, LowRank
from dadt.comm.compression.powersgd import Round
from dadt.comm.executors.device import Averaging, Device
from dadt.errors import CommError
from dadt.train.exchange.background import Background, Wait


class RankLink(Protocol):
    """Interface of this rank's connection with its peers, as an exchange uses it."""

    @property
    def background(self) -> Background | None: ...

    @property
    def engine(self) -> Engine: ...

    @property
    def device(self) -> Device | None: ...

    @property
    def members(self) -> Sequence[int]:
        """Ranks that take part in an exchange, in the order of their metadata."""

    def keep_failed(self, needed: Any) -> None:
        """Keep the memory that a failed operation uses alive, as a library may still access it."""

    def wait(self, work: Work | Averaging) -> None:
        """Wait until the work is done. Raises CommError."""


class BucketExchange:
    """The allreduces of a set of buckets. Each bucket takes one allreduce, or two with low-rank compression, where the
    second depends on the first one's result."""

    def __init__(self, peers: RankLink, name: str) -> None:
        self.name = name
        self.began = perf_counter()
        self._peers = peers
        self._works: list[Work | Averaging] = []
        """The first allreduce of each bucket, in order."""
        self._second_works: list[Work | Averaging] = []
        self._rounds: list[tuple[int, Round]] = []
        """The index of each bucket with low-rank compression, which takes two allreduces, and its state between the
        two.
        """
        self._alive: list[list[torch.Tensor | None]] = []
        """Tensors that must stay alive because operations under way read them."""
        self._under_way: list[tuple[Bucket, int]] = []
        """Contiguous buffers that operations under way write to, each as a bucket and the index of its buffer."""
        self._submitted: list[tuple[list[Work | Averaging], tuple[Any, ...]]] = []
        """Operations that may have to be launched again, in order: for each the list that contains its work object, and
        the arguments of `_submit`."""

    @property
    def works(self) -> list[Work | Averaging]:
        return self._works + self._second_works

    @property
    def done(self) -> bool:
        return all(work.done for work in self.works)

    @property
    def seconds(self) -> float:
        """Seconds in which the operations transferred bytes, without the time in which they waited for the slowest
        rank."""
        return sum(work.seconds for work in self.works)

    def submit_bucket(
        self,
        index: int,
        bucket: Bucket,
        form: Form | None,
        staged: Staged,
        into: int,
        lane: bytes,
        weight: float = 1.0,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Submit the first allreduce of the next bucket. form: the bucket's compression; None for no compression. into:
        index of the contiguous buffer that receives the mean. scale: loss scale of the values."""
        name = f"{self.name}, bucket {index}"
        if isinstance(form, LowRank):
            plain = bucket.layout.total * bucket.layout.dtype.itemsize
            self._works.append(self._submit(form.first, staged, into, name, lane, weight, plain=plain))
        else:
            feedback = form if isinstance(form, Feedback) else None
            self._enqueue(self._works, bucket, staged, into, name, lane, weight, feedback, scale)

    def _enqueue(self, works: list[Work | Averaging], *operation: Any) -> None:
        works.append(self._submit(*operation))
        self._submitted.append((works, operation))

    def repeat(self) -> None:
        """Submit all operations again with their original arguments, on the connection of another group of ranks."""
        for works, _ in self._submitted:
            works.clear()
        for works, operation in self._submitted:
            works.append(self._submit(*operation))

    def renew(self) -> None:
        """Allocate other memory for the buckets after a failure, as a library may still write to the failed operations'
        memory."""
        for bucket, turn in self._under_way:
            bucket.renew(turn)
        self._under_way.clear()

    def _submit_second(
        self, index: int, round_: Round, into: int, weight: float = 1.0, *, held: bool = False
    ) -> Work | Averaging:
        name = f"{self.name}, bucket {index}, second half"
        staged = round_.then
        return self._submit(round_.form.second, staged, into, name, self._lane(staged), weight, plain=0, held=held)

    def _lane(self, staged: Staged) -> bytes:
        """Return the bytes of metadata that this rank sends along with the bucket's allreduce."""
        return b""

    def _submit(
        self,
        bucket: Bucket,
        staged: Staged,
        into: int,
        name: str,
        lane: bytes,
        weight: float,
        feedback: Feedback | None = None,
        scale: torch.Tensor | None = None,
        *,
        plain: int = -1,
        held: bool = False,
    ) -> Work | Averaging:
        """Submit one allreduce. plain: with low-rank compression, number of bytes of the uncompressed values that it
        replaces; otherwise -1. held: whether the C++ engine waits for a call of `release` before it begins the
        operation."""
        self._alive.append(staged.values)
        self._under_way.append((bucket, into))
        device = self._peers.device
        if device is not None and bucket.direct:
            places, flat = bucket.views[into], bucket.flats[into]
            coding = None if feedback is None else (feedback, feedback.keep(scale))
            beside = {"name": name, "weight": weight, "lane": lane, "plain": plain}
            return device.average(staged.values, places, flat, coding, **beside)
        # A bucket that is still being copied from a GPU is submitted to the C++ engine before the copy ends, so that
        # the host need not wait.
        ready, background, engine = staged.ready, self._peers.background, self._peers.engine
        comes = ready is not None and background is not None and not held and not ready.query()  # type: ignore[no-untyped-call]
        if ready is not None and not comes:
            ready.synchronize()
        work = engine.allreduce(
            bucket.layout,
            [0 if t is None else t.data_ptr() for t in staged.values],
            bucket.pointers[into],
            name,
            weight,
            lane,
            plain=plain,
            held=held or comes,
            flat=bucket.flats[into].data_ptr(),
            room=bucket.room(into),
            **({} if feedback is None else feedback.arguments(bucket.layout.total, scale)),
        )
        if comes and ready is not None and background is not None:

            def release(_: Wait) -> None:
                ready.synchronize()
                engine.release(work)

            background.begin(release)
        return work

    def _await(self) -> None:
        """Wait until all submitted operations are done. Raises CommError."""
        try:
            for work in self.works:
                self._peers.wait(work)
        except CommError:
            self._peers.keep_failed(self)
            raise
        self._under_way.clear()

    def _let_go(self) -> None:
        """Free memory and arguments that only a repetition of the operations would need."""
        self._submitted.clear()
        self._alive.clear()
