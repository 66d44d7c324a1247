"""Tensors of a device are averaged where they are, on a stream of our own. The host waits for no device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any, Protocol

import torch

from dadt import _core
from dadt.comm.bucket import DTYPES
from dadt.comm.compression.base import BLOCK
from dadt.comm.compression.feedback import Feedback
from dadt.comm.compression.half import narrowed
from dadt.errors import CommTimeout, PeerLost

ABORT_SECONDS = 30.0
"""Seconds that a library, and then the device, may take after an abort to end what is under way."""
LOOK_SECONDS = 1e-4
"""Seconds between two looks whether the device has passed an event."""

Coding = tuple[Feedback, "torch.Tensor | float"]
"""How a bucket is compressed, and the factor of the residual of earlier exchanges."""


class Starter(Protocol):
    """An executor of a device's tensors, which starts operations and does not wait for them."""

    means: bool
    """Whether `start` gives means of real and complex numbers, which saves a pass over them; else it gives sums."""

    def start(self, flat: torch.Tensor) -> Any:
        """Begin a sum over ranks in place, or a mean. `wait` of what is returned makes the current stream wait for
        it."""

    def alltoall(self, sent: torch.Tensor, received: torch.Tensor) -> Any:
        """Begin to exchange equal parts of bytes with each rank, in the order of ranks. Returns what `start` does."""

    def gather(self, mine: torch.Tensor, all: torch.Tensor) -> Any:
        """Begin to gather equal parts from all ranks, in their order. Returns what `start` does."""

    def abort(self) -> None: ...

    def close(self) -> bool | None: ...


class Device:
    """Averages tensors of one device in the order in which they are given, which must be that of all ranks."""

    def __init__(
        self,
        executor: Starter,
        engine: _core.Engine,
        device: torch.device,
        rank: int,
        world_size: int,
        survives: bool = False,
    ) -> None:
        """executor: of the device's tensors. engine: for what goes beside them. survives: training goes on when ranks
        are lost, so the host waits for each average: what was aborted must not be taken for one."""
        self._survives = survives
        self._lock = threading.Lock()
        self._abortion: threading.Thread | None = None
        """The thread that aborts what is under way; None until there is an abort."""
        self._rank = rank
        self.sent = (0, 0)
        """Bytes that this rank has sent so far, and bytes that it would have sent without compression."""
        self.device = device
        self.on_computed: Callable[[str, Any, Any], None] | None = None
        """Called with a name and the events around what the device computes; None without a timeline."""
        self._executor = executor
        self._engine = engine
        self._world_size = world_size
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream()

    def average(
        self,
        values: Sequence[torch.Tensor | None],
        places: Sequence[torch.Tensor],
        flat: torch.Tensor,
        coding: Coding | None = None,
        **beside: Any,
    ) -> Averaging:
        """Weighted mean over ranks into `flat`, of which `places` are the parts for the values; None: zeros.

        coding: how it travels, and how much of what is owed counts. beside: name, weight, lane and plain, as of
        `Engine.allreduce`. What is on the current stream comes first.
        """
        ready, began, ended = self._event(), self._event(timing=True), self._event(timing=True)
        ready.record(self._module.current_stream(self.device))
        plain = int(beside.pop("plain", -1))
        # Compressed values of 16 bits are summed in float32, and rounded after the division.
        wide = coding is not None and flat.element_size() == 2
        sums = torch.empty_like(flat, dtype=torch.float32) if wide else flat
        self._sum(values, places, flat, sums, coding, beside["weight"], beside["name"], ready, began, ended)
        self._count(flat, coding, plain)
        work = self._engine.allreduce(_core.Layout(DTYPES[flat.dtype], [0]), [0], [0], **beside)
        divided = self._world_size if coding is None and self._executor.means and not _whole(flat) else 1
        return self._handle(work, flat, sums, divided, began, ended)

    def _handle(
        self, work: _core.Work, flat: torch.Tensor, sums: torch.Tensor, divided: int, began: Any, ended: Any
    ) -> Averaging:
        confirm = self._confirm if self._survives else None
        return Averaging(work, flat, sums, divided, began, ended, self._module, self._world_size, confirm)

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
        """On this stream, after `ready`; `began` and `ended` are recorded around what ranks do together.

        sums: where the sums go, `flat` itself or as many values.
        """
        pairs = zip(places, values, strict=True)
        moved = [(place, value) for place, value in pairs if value is not None and value is not place]
        absent = [place for place, value in zip(places, values, strict=True) if value is None]
        with torch.no_grad(), self._module.stream(self._stream):
            self._stream.wait_event(ready)
            if moved:
                torch._foreach_copy_([place for place, _ in moved], [value for _, value in moved])
            if absent:
                torch._foreach_zero_(absent)
            if weight == 0:
                flat.zero_()  # what it has may be no number
            if sums is not flat:
                sums.copy_(flat)
            if weight not in (0, 1):
                sums.mul_(weight)
            began.record(self._stream)
            if coding is None:
                self._executor.start(flat).wait()  # this stream does; the host goes on
            else:
                self._sum_compressed(sums, *coding)
            ended.record(self._stream)
            if self.on_computed is not None:
                self.on_computed(name, began, ended)
            keep = coding[1] if coding is not None and isinstance(coding[1], torch.Tensor) else flat
            for tensor in (flat, sums, keep, *(value for _, value in moved)):
                if tensor.is_cuda:  # its memory is not given to others before this stream has gone on
                    tensor.record_stream(self._stream)

    def _sum_compressed(self, flat: torch.Tensor, feedback: Feedback, keep: torch.Tensor | float) -> None:
        """Each rank sums a part of all, in float32 and in the order of ranks, and sends it to all: the bytes of a ring,
        and no rounding at each hop."""
        codec, size, total = feedback.codec, self._world_size, flat.numel()
        blocks = -(-total // (BLOCK * size)) * size
        owed = feedback.owed(total, flat.device)
        owed.mul_(keep)
        # Divided before, as a sum may be too large for 16 bits where the mean is not.
        values = torch.zeros(blocks, BLOCK, device=flat.device, dtype=torch.float32)
        values.view(-1)[:total] = flat.to(torch.float32) / size + owed
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
        self._executor.gather(mine, wire).wait()
        flat.copy_(codec.decode(wire).view(-1)[:total] * size)

    def _count(self, flat: torch.Tensor, coding: Coding | None, plain: int) -> None:
        """Add to `sent` the bytes of one average: as many go round a ring as are summed in parts."""
        size, ranks = flat.numel() * flat.element_size(), self._world_size
        moved = size
        if coding is not None:
            moved = -(-flat.numel() // (BLOCK * ranks)) * ranks * coding[0].codec.core.block_bytes
        sent, before = self.sent
        each = 2 * (ranks - 1) / ranks
        self.sent = (sent + int(moved * each), before + int((size if plain < 0 else plain) * each))

    def _event(self, timing: bool = False) -> Any:
        return self._module.Event(enable_timing=True) if timing and self._module is torch.cuda else self._module.Event()

    def abort(self) -> None:
        """End what is under way: a script that waits for the device would wait for a rank that is gone. Any thread;
        does not block, though the library may."""
        with self._lock:
            if self._abortion is None:
                self._abortion = threading.Thread(target=self._executor.abort, name="dadt-abort", daemon=True)
                self._abortion.start()

    def close(self, failed: bool) -> None:
        """failed: peers may never do their part of what is under way. Raises CommTimeout where the library or the
        device does not come to its end: its tensors cannot be used any more, then."""
        if failed:
            self.abort()
        if self._abortion is not None:
            deadline = monotonic() + ABORT_SECONDS
            self._abortion.join(ABORT_SECONDS)
            ended = self._event()
            ended.record(self._stream)
            while self._survives and not ended.query() and monotonic() < deadline:
                sleep(LOOK_SECONDS)
            if self._abortion.is_alive() or (self._survives and not ended.query()):
                raise CommTimeout(
                    f"{self.device}: what was under way has not ended {ABORT_SECONDS:g} s after its abort"
                )
        self._executor.close()

    def _confirm(self, name: str, ended: Any, timeout: float) -> None:
        """Wait until the device has gone past `ended`. Raises PeerLost where an abort has brought it there."""
        deadline = monotonic() + timeout
        while self._abortion is None and not ended.query():
            if monotonic() >= deadline:
                raise CommTimeout(f"{name}: {self.device} was not done within {timeout:g} s")
            sleep(LOOK_SECONDS)
        if self._abortion is not None:  # looked at last: until there is one, nothing ends but by itself
            raise PeerLost(f"{name}: the average on {self.device} was given up")


class Averaging:
    """Like the engine's Work. After `wait` the current stream waits for the device, and divides by the weights."""

    def __init__(
        self,
        work: _core.Work,
        flat: torch.Tensor,
        sums: torch.Tensor,
        divided: int,
        began: Any,
        ended: Any,
        module: Any,
        world_size: int,
        confirm: Callable[[str, Any, float], None] | None = None,
    ) -> None:
        """divided: the number by which the sums are divided already. confirm: waits for the device, and raises if an
        abort has ended it; None if no abort can look like an average."""
        self._confirm = confirm
        self._divided = divided
        self._work = work
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = (flat, sums)
        self._began, self._ended = began, ended
        self._module = module
        self._world_size = world_size

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
        """Seconds that the device took, if it is done and can tell; else those of the engine's work beside it."""
        if self._module is torch.cuda and self._ended.query():
            return float(self._began.elapsed_time(self._ended)) / 1e3
        return self._work.seconds

    @property
    def waited(self) -> float:
        return self._work.waited

    def wait(self, timeout: float) -> None:
        """Wait for the peers; for the device only to confirm it. Raises what the engine's Work raises."""
        self._work.wait(timeout)
        if self._tensors is not None:
            if self._confirm is not None:
                self._confirm(self.name, self._ended, timeout)
            flat, sums = self._tensors
            self._module.current_stream(flat.device).wait_event(self._ended)
            with torch.no_grad():
                divisor = (self._work.weight_sum or self._world_size) / self._divided
                if divisor != 1:
                    sums.div_(divisor, rounding_mode="trunc" if _whole(flat) else None)
                if sums is not flat:
                    flat.copy_(narrowed(sums, flat.dtype))
            self._tensors = None


def _whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
