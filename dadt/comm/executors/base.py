"""The interface of executors written in Python: blocking collectives on flat tensors in host memory. The C++ core has
executors of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from dadt._core import Codec, Engine
from dadt.comm.executors.device import Device
from dadt.comm.link_totals import Links, LinkTotals


class P2PWork(Protocol):
    """A message being sent or received."""

    @property
    def done(self) -> bool: ...

    def wait(self, timeout: float) -> None:
        """Wait until the message's tensor may be used again. Raises CommTimeout, PeerLost, or Mismatch if sender and
        receiver disagree on the length."""

    @property
    def source(self) -> int:
        """The rank that sent the message; known after `wait`."""


class PointToPoint(Protocol):
    """Messages between two ranks, independent of collectives. Methods may be called from any thread; messages of the
    same pair of ranks and tag stay in order."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> P2PWork:
        """Start sending the tensor, which must be contiguous in host memory and stay unchanged until the returned work
        is done."""

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int = 0) -> P2PWork:
        """Start receiving into the contiguous tensor. peer: the sending rank; None takes the first message with this
        tag from any rank."""

    def abort(self) -> None:
        """Make all waiting calls raise an error, if the library allows it. May be called from any thread, more than
        once."""


class Executor(PointToPoint, Protocol):
    """Moves bytes between ranks. Collectives are called by one thread only, messages by any; all tensors are flat."""

    name: str

    def allreduce(self, flat: torch.Tensor, reduction: str) -> None:
        """Reduce the tensor in place over all ranks. reduction: sum, min, max or product. All ranks get the same
        bits."""

    def allgather(self, mine: torch.Tensor, all: torch.Tensor) -> None:
        """Gather the bytes `mine`, of equal length on every rank, into `all`, ordered by rank."""

    def broadcast(self, flat: torch.Tensor, root: int) -> None: ...

    def exchange(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        """Send bytes to and receive bytes from each rank. Sender and receiver both know the lengths. A rank's part for
        itself is copied, too."""

    def close(self) -> bool | None:
        """Close the executor. Returns whether the memory of all its operations, failed ones included, is no longer in
        use."""


@runtime_checkable
class Compressing(Protocol):
    """An executor that decides itself which parts of an allreduce are worth compressing."""

    def allreduce_compressed(self, flat: torch.Tensor, codec: Codec, owed: int, keep: float) -> tuple[int, int]:
        """Sum the float32 or float64 tensor in place. owed: address of the residual (compression error). keep: factor
        for the residual. Returns the bytes that this rank has sent, and bytes that it would have sent uncompressed."""


@runtime_checkable
class Measured(Protocol):
    """An executor that counts the bytes of its connections with other hosts."""

    def links(self) -> Mapping[int, LinkTotals]:
        """Return the traffic totals for each other host; a key is the number of one rank on that host."""


@dataclass(frozen=True, slots=True)
class Connection:
    """This rank's connection with its peers: a C++ engine for collectives, which all ranks submit in the same order,
    and `mail` for messages between two ranks."""

    engine: Engine
    mail: PointToPoint
    close: Callable[[], bool]
    """Called after the C++ engine is closed. Returns whether the memory of all operations, failed ones included, is no
    longer in use; if not, the memory must stay allocated."""
    broadcaster: Engine | None = None
    """C++ engine for broadcasts if they use a different executor than other operations; else None."""
    device: Device | None = None
    """Device that averages tensors in its own memory; None if tensors travel through host memory."""

    links: Links = dict
    """Function that returns the traffic with other hosts so far; an empty mapping if no bytes are counted."""

    told: bool = True
    """Whether ranks that call different operations get an error that names the difference. Some libraries end the
    process instead."""

    def engine_of(self, kind: str) -> Engine:
        """Return the C++ engine for operations of this kind, such as "broadcast"."""
        return self.broadcaster or self.engine if kind == "broadcast" else self.engine

    def abort(self, reason: str, lost: bool) -> None:
        """Fail all pending and future operations. reason: text of their errors. lost: whether a peer was lost. Does not
        block; may be called from any thread."""
        for engine in {self.engine, self.engine_of("broadcast")}:
            engine.abort(reason, lost)
        self.mail.abort()
        if self.device is not None:
            self.device.abort()

    def abandon(self, reason: str) -> None:
        """Abort and close the connection after an error."""
        self.engine.abort(reason)
        self.engine.close(0.0)
        self.close()

    @property
    def failed(self) -> bool:
        """Whether one of the connection's C++ engines has an error."""
        return self.engine.error is not None or (self.broadcaster is not None and self.broadcaster.error is not None)


def renumbered(text: str, ranks: Sequence[int]) -> str:
    """Return a group's error text, with each rank's index in the group replaced by its number in the world. ranks:
    these numbers, by index."""
    return re.sub(r"\brank (\d+)\b", lambda found: f"rank {ranks[int(found[1])]}", text)


def together(rest: Connection, broadcasts: Connection, timeout: float) -> Connection:
    """Combine two connections into one, in which broadcasts use the second. Closing the result closes both."""

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
    """Return the connection, extended so that the device averages tensors in its own memory."""

    def close() -> bool:
        try:
            device.close(failed=host.engine.error is not None)
        finally:
            ended = host.close()
        # Only the result for host memory matters, because CUDA reuses freed GPU memory only after the operations on its
        # stream.
        return ended

    return replace(host, device=device, close=close)
