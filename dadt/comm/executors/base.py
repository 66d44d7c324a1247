"""The interface of an executor written in Python: blocking collectives on flat host memory. The core's own are C++."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from dadt._core import Codec, Engine
    from dadt.comm.executors.device import Device


class P2PWork(Protocol):
    """A message under way."""

    @property
    def done(self) -> bool: ...

    def wait(self, timeout: float) -> None:
        """Wait until the tensor may be used again. Raises CommTimeout, PeerLost, and Mismatch if the lengths differ."""

    @property
    def source(self) -> int:
        """The rank that sent the message; known after `wait`."""


class PointToPoint(Protocol):
    """Messages between two ranks, beside the operations of all. Any thread. One pair and tag keeps its order."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> P2PWork:
        """tensor: contiguous, of the host, unchanged until the transit is done."""

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int = 0) -> P2PWork:
        """Overwrite the contiguous tensor. peer None: from whoever sends with this tag first."""

    def abort(self) -> None:
        """Make all waiting calls raise, if the library can. Any thread, more than once."""


class Executor(PointToPoint, Protocol):
    """Moves bytes between ranks. One thread calls its verbs, but for PointToPoint's; all tensors are flat."""

    name: str

    def allreduce(self, flat: torch.Tensor, reduction: str) -> None:
        """Reduce in place: sum, min, max or product over ranks, the same bits on every rank."""

    def allgather(self, mine: torch.Tensor, all: torch.Tensor) -> None:
        """Bytes of equal length from every rank, by rank, one after the other."""

    def broadcast(self, flat: torch.Tensor, root: int) -> None: ...

    def exchange(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        """Bytes to and from each rank. Both sides know the lengths. A rank's own are copied, too."""

    def close(self) -> bool | None:
        """End the executor. Returns whether nothing uses the memory of its operations any more, failed ones
        included."""


@runtime_checkable
class Compressing(Protocol):
    """An executor that knows itself what of an allreduce is worth compressing."""

    def allreduce_compressed(self, flat: torch.Tensor, codec: Codec, owed: int, keep: float) -> tuple[int, int]:
        """Sum in place, of float32 or float64; owed, keep: as of Engine.allreduce. Gives the bytes that this rank has
        sent, and would have sent uncompressed, where bytes count."""


@dataclass(frozen=True, slots=True)
class Connection:
    """This rank's connection with its peers: an engine for what all do in one order, mail for what two do."""

    engine: Engine
    mail: PointToPoint
    close: Callable[[], bool]
    """Call this after the engine is closed. Returns whether nothing uses the memory of operations any more, failed ones
    included; if not, that memory has to be kept."""
    broadcaster: Engine | None = None
    """The engine for broadcasts if another executor moves them, else None."""
    device: Device | None = None
    """The device that averages tensors where they are; None if they travel through host memory."""

    told: bool = True
    """Whether ranks that are in different operations get an error that says so; some libraries end the process
    instead."""

    def engine_of(self, kind: str) -> Engine:
        """The engine for operations of this kind, such as "broadcast"."""
        return self.broadcaster or self.engine if kind == "broadcast" else self.engine

    def abort(self, reason: str, lost: bool) -> None:
        """Fail everything pending and to come. lost: since a peer is. Any thread; does not block."""
        for engine in {self.engine, self.engine_of("broadcast")}:
            engine.abort(reason, lost)
        self.mail.abort()
        if self.device is not None:
            self.device.abort()

    def abandon(self, reason: str) -> None:
        """End the connection after an error, so that nothing uses it any more."""
        self.engine.abort(reason)
        self.engine.close(0.0)
        self.close()

    @property
    def failed(self) -> bool:
        """Whether one of its engines has an error."""
        return self.engine.error is not None or (self.broadcaster is not None and self.broadcaster.error is not None)


def together(rest: Connection, broadcasts: Connection, timeout: float) -> Connection:
    """Two connections as one: broadcasts go over the second. It ends with the first."""

    def close() -> bool:
        try:
            if rest.engine.error is not None:
                broadcasts.engine.abort(f"the other executor has failed: {rest.engine.error}")
            broadcasts.engine.close(timeout)
        finally:
            ended = [broadcasts.close(), rest.close()]
        return all(ended)

    return replace(rest, broadcaster=broadcasts.engine, close=close)


def beside(host: Connection, device: Device) -> Connection:
    """The connection, which also averages tensors of the device."""

    def close() -> bool:
        try:
            device.close(failed=host.engine.error is not None)
        finally:
            ended = host.close()
        return ended  # a device's memory is given to nobody before its stream has gone on

    return replace(host, device=device, close=close)
