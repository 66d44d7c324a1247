"""Averages tensors in the memory of their device, on a separate CUDA stream. The host does not wait for the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any, Protocol

import torch

from dadt import _core
from dadt.comm.bucket import DTYPES
from dadt.comm.compression.base import BLOCK, in_blocks
from dadt.comm.compression.feedback import Feedback
from dadt.comm.compression.half import narrowed
from dadt.errors import CommTimeout, PeerLost

ABORT_SECONDS = 30.0
"""Seconds that the library, and then the device, may take to end the operations in progress after an abort."""
LOOK_SECONDS = 1e-4
"""Seconds between checks whether the device has reached an event."""

Coding = tuple[Feedback, "torch.Tensor | float"]
"""The compression state of a bucket, and the factor by which the residual of earlier exchanges is multiplied."""


class Starter(Protocol):
    """An executor for tensors on a device, which starts operations without waiting for them."""

    means: bool
    """Whether `start` computes means of floating-point and complex numbers, so that no division follows; otherwise it
    computes sums."""

    def start(self, flat: torch.Tensor) -> Any:
        """Start a sum over ranks, or a mean if `means`, in place. The returned work's `wait` makes the current CUDA
        stream wait, not the host."""

    def alltoall(self, sent: torch.Tensor, received: torch.Tensor) -> Any:
        """Start to exchange equal parts of bytes with each rank, in rank order. The returned work's `wait` makes the
        current CUDA stream wait, not the host."""

    def gather(self, mine: torch.Tensor, all: torch.Tensor) -> Any:
        """Start to gather equal parts from all ranks, in rank order. The returned work's `wait` makes the current CUDA
        stream wait, not the host."""

    def abort(self) -> None: ...

    def close(self) -> bool | None: ...


class Device:
    """Averages tensors of one device over ranks. All ranks must submit their tensors in the same order."""

    def __init__(
        self,
        executor: Starter,
        engine: _core.Engine,
        device: torch.device,
        rank: int,
        world_size: int,
        survives: bool = False,
    ) -> None:
        """executor: sums tensors on the device. engine: C++ engine that exchanges the step metadata and the weights of
        ranks. survives: whether training continues when ranks are lost. In this case the host waits for each average,
        since an aborted average looks like a finished one on the device.
        """
        self.survives = survives
        self._lock = threading.Lock()
        self._abortion: threading.Thread | None = None
        """Thread that aborts the operations in progress; None if there was no abort."""
        self._rank = rank
        self.sent = (0, 0)
        """Bytes that this rank has sent so far, and bytes that it would have sent without compression."""
        self.device = device
        self.on_computed: Callable[[str, Any, Any], None] | None = None
        """Called with an operation's name and the device events recorded at its begin and end, to record a timeline;
        None if no timeline is recorded."""
        self._executor = executor
        self._engine = engine
        self.world_size = world_size
        self.module: Any = torch.get_device_module(device)
        self._stream = self.module.Stream()

    def average(
        self,
        values: Sequence[torch.Tensor | None],
        places: Sequence[torch.Tensor],
        flat: torch.Tensor,
        coding: Coding | None = None,
        **beside: Any,
    ) -> Averaging:
        """Compute the weighted mean of `values` over ranks into `flat`, after the work already queued on the current
        CUDA stream. places: parts of `flat`, one for each value; a value of None counts as zeros. coding: state of the
        compression, and the factor by which its residual is multiplied. beside: further arguments of `Engine.allreduce`
        (name, weight, the step's metadata as `lane`, the number of bytes without compression as `plain`).
        """
        ready, began, ended = self._event(), self._event(timing=True), self._event(timing=True)
        ready.record(self.module.current_stream(self.device))
        plain = int(beside.pop("plain", -1))
        # Compressed 16-bit values are summed in float32 and rounded only once, after the division.
        wide = coding is not None and flat.element_size() == 2
        sums = torch.empty_like(flat, dtype=torch.float32) if wide else flat
        self._sum(values, places, flat, sums, coding, beside["weight"], beside["name"], ready, began, ended)
        self._count(flat, coding, plain)
        work = self._engine.allreduce(_core.Layout(DTYPES[flat.dtype], [0]), [0], [0], **beside)
        divided = self.world_size if coding is None and self._executor.means and not _whole(flat) else 1
        return self._handle(work, flat, sums, divided, began, ended)

    def _handle(self, *of_averaging: Any) -> Averaging:
        return Averaging(self, *of_averaging)

    def _sum(
        self,
        values: Sequence[torch.Tensor | None],
        places: Sequence[torch.Tensor],
        flat: torch.Tensor,
        sums: torch.Tensor,
        coding: Coding | None,
        weight: float,
        name: str,
        ready: Any,
        began: Any,
        ended: Any,
    ) -> None:
        """Sum the values over ranks on the CUDA stream of this object, after the event `ready`. The events `began` and
        `ended` enclose the communication.

        sums: receives the sums; `flat` itself, or a tensor of the same length.
        """
        pairs = zip(places, values, strict=True)
        moved = [(place, value) for place, value in pairs if value is not None and value is not place]
        absent = [place for place, value in zip(places, values, strict=True) if value is None]
        with torch.no_grad(), self.module.stream(self._stream):
            self._stream.wait_event(ready)
            if moved:
                torch._foreach_copy_([place for place, _ in moved], [value for _, value in moved])
            if absent:
                torch._foreach_zero_(absent)
            if weight == 0:
                flat.zero_()  # multiplying infinities and NaN by the weight 0 would not remove them
            if sums is not flat:
                sums.copy_(flat)
            if weight not in (0, 1):
                sums.mul_(weight)
            began.record(self._stream)
            if coding is None:
                self._executor.start(flat).wait()  # wait() makes the CUDA stream wait, not the host
            else:
                starts = [(place.storage_offset() - flat.storage_offset(), place.numel()) for place in absent]
                self._sum_compressed(sums, *coding, [slice(start, start + count) for start, count in starts])
            ended.record(self._stream)
            if self.on_computed is not None:
                self.on_computed(name, began, ended)
            keep = coding[1] if coding is not None and isinstance(coding[1], torch.Tensor) else flat
            for tensor in (flat, sums, keep, *(value for _, value in moved)):
                # Keep the allocator from reusing the memory before the CUDA stream of this object has finished with it.
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)

    def _sum_compressed(
        self, flat: torch.Tensor, feedback: Feedback, keep: torch.Tensor | float, absent: Sequence[slice]
    ) -> None:
        """Sum the values in compressed form: each rank sums one part, in float32 and in rank order, and sends the sum
        to all ranks. This moves as many bytes as a ring allreduce, without rounding at every hop. absent: where this
        rank has no values; what is owed there remains, as the sum is not used if no rank has any."""
        codec, size, total = feedback.codec, self.world_size, flat.numel()
        blocks = -(-total // (BLOCK * size)) * size
        owed = feedback.owed(total, flat.device)
        owed.mul_(keep)
        kept = [owed[each].clone() for each in absent]
        for each in absent:
            owed[each] = 0.0
        # Values are divided before the sum, since the sum may exceed the range of 16-bit floats while the mean does
        # not.
        values = in_blocks(flat.to(torch.float32) / size + owed, blocks)
        wire = codec.encode(values)
        lost = (values - codec.decode(wire)).view(-1)[:total]
        owed.copy_(torch.where(lost.isfinite(), lost, owed))
        received = torch.empty_like(wire)
        self._executor.alltoall(wire, received).wait()
        parts = received.view(size, blocks // size, -1)
        sums = codec.decode(parts[0])
        for part in parts[1:]:
            sums += codec.decode(part)
        mine = codec.encode(sums)
        begin = self._rank * sums.numel()
        mean_lost = (sums - codec.decode(mine)).view(-1)[: max(0, total - begin)]
        owed[begin : begin + sums.numel()] += torch.where(mean_lost.isfinite(), mean_lost, 0.0)
        for each, before in zip(absent, kept, strict=True):
            owed[each] += before
        self._executor.gather(mine, wire).wait()
        flat.copy_(codec.decode(wire).view(-1)[:total] * size)

    def _count(self, flat: torch.Tensor, coding: Coding | None, plain: int) -> None:
        """Add the bytes of one average to `sent`. A ring allreduce and the compressed sum send equally many bytes for
        equally large values. plain: size of the values before compression, in bytes; if negative, the size of
        `flat`."""
        size = moved = flat.nbytes
        ranks = self.world_size
        if coding is not None:
            moved = -(-flat.numel() // (BLOCK * ranks)) * ranks * coding[0].codec.core.block_bytes
        sent, before = self.sent
        each = 2 * (ranks - 1) / ranks
        self.sent = (sent + int(moved * each), before + int((size if plain < 0 else plain) * each))

    def _event(self, timing: bool = False) -> Any:
        return self.module.Event(enable_timing=True) if timing and self.module is torch.cuda else self.module.Event()

    def abort(self) -> None:
        """End the operations in progress, so that a script that waits for the device does not wait for a lost rank. May
        be called from any thread; does not block, though the library's own abort may."""
        with self._lock:
            if self._abortion is None:
                self._abortion = threading.Thread(target=self._executor.abort, name="dadt-abort", daemon=True)
                self._abortion.start()

    def close(self, failed: bool) -> None:
        """Close the executor. failed: abort first, because peers may never finish their part. Raises CommTimeout if the
        library or the device does not stop within ABORT_SECONDS; afterwards the device's tensors must not be used."""
        if failed:
            self.abort()
        if self._abortion is not None:
            deadline = monotonic() + ABORT_SECONDS
            self._abortion.join(ABORT_SECONDS)
            ended = self._event()
            ended.record(self._stream)
            while self.survives and not ended.query() and monotonic() < deadline:
                sleep(LOOK_SECONDS)
            if self._abortion.is_alive() or (self.survives and not ended.query()):
                raise CommTimeout(
                    f"{self.device}: what was under way has not ended {ABORT_SECONDS:g} s after its abort"
                )
        self._executor.close()

    def confirm(self, name: str, ended: Any, timeout: float) -> None:
        """Wait until the device has reached the event `ended`. Raises PeerLost if the operations were aborted, so that
        the event does not mean a finished average, and CommTimeout after `timeout` seconds."""
        deadline = monotonic() + timeout
        while self._abortion is None and not ended.query():
            if monotonic() >= deadline:
                raise CommTimeout(f"{name}: {self.device} was not done within {timeout:g} s")
            sleep(LOOK_SECONDS)
        # The abort is checked last, because the event means a finished average only if no abort began before it.
        if self._abortion is not None:
            raise PeerLost(f"{name}: the average on {self.device} was given up")


class Averaging:
    """Work handle of one average on a device, used like the C++ engine's work handles. After `wait`, the current CUDA
    stream waits for the average and divides it by the sum of weights."""

    def __init__(
        self,
        device: Device,
        work: _core.Work,
        flat: torch.Tensor,
        sums: torch.Tensor,
        divided: int,
        began: Any,
        ended: Any,
    ) -> None:
        """divided: number by which the executor has already divided the sums."""
        self._device = device
        self._divided = divided
        self._work = work
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = (flat, sums)
        self._began, self._ended = began, ended

    @property
    def name(self) -> str:
        return self._work.name

    @property
    def done(self) -> bool:
        return self._work.done and bool(self._ended.query())

    @property
    def lanes(self) -> list[bytes]:
        return self._work.lanes

    @property
    def weight_sum(self) -> float:
        return self._work.weight_sum

    @property
    def seconds(self) -> float:
        """Seconds that the average took: on a CUDA device that has finished, the time between its events; otherwise the
        time of the C++ engine's operation that exchanged the metadata."""
        if self._device.module is torch.cuda and self._ended.query():
            return float(self._began.elapsed_time(self._ended)) / 1e3
        return self._work.seconds

    def wait(self, timeout: float) -> None:
        """Wait for the peers, and for the device only if training continues when ranks are lost. Raises the errors of
        the C++ engine's operations."""
        self._work.wait(timeout)
        if self._tensors is not None:
            if self._device.survives:
                self._device.confirm(self.name, self._ended, timeout)
            flat, sums = self._tensors
            self._device.module.current_stream(flat.device).wait_event(self._ended)
            with torch.no_grad():
                divisor = (self._work.weight_sum or self._device.world_size) / self._divided
                if divisor != 1:
                    sums.div_(divisor, rounding_mode="trunc" if _whole(flat) else None)
                if sums is not flat:
                    flat.copy_(narrowed(sums, flat.dtype))
            self._tensors = None


def _whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
