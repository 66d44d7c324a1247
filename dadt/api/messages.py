"""Functions that send a tensor from one rank to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dadt.api.lifecycle import among_of
from dadt.api.session import MOST_TAG
from dadt.comm.collectives import operation
from dadt.comm.collectives.process_set import Handle, ProcessSet

if TYPE_CHECKING:
    from torch import Tensor


def send(tensor: Tensor, peer: int, tag: int = 0, *, process_set: ProcessSet | None = None) -> None:
    """Send a tensor to a rank that calls `recv`. tag: 0 to 2**18; messages from one rank to another with the same tag
    keep their order."""
    isend(tensor, peer, tag, process_set=process_set).wait()


def isend(tensor: Tensor, peer: int, tag: int = 0, *, process_set: ProcessSet | None = None) -> Handle[None]:
    """Start to send a tensor to a rank that calls `recv`, and return a handle. The tensor must not change until you
    have waited for the handle."""
    among = among_of(process_set)
    _check_tag(tag)
    host = operation.host_copy(tensor)
    return Handle(among, among.mail.send(host, among.number_of(peer, "peer"), tag))


def recv(tensor: Tensor, peer: int | None = None, tag: int = 0, *, process_set: ProcessSet | None = None) -> int:
    """Receive a tensor from a rank, in place, and return that rank.

    tensor: must have as many bytes as the sender's, otherwise raises Mismatch. peer: the sender's rank; None accepts
    the first message with this tag from any rank.
    """
    return irecv(tensor, peer, tag, process_set=process_set).wait()


def irecv(
    tensor: Tensor, peer: int | None = None, tag: int = 0, *, process_set: ProcessSet | None = None
) -> Handle[int]:
    """Start to receive a tensor from a rank, in place, and return a handle whose result is the rank of the sender."""
    among = among_of(process_set)
    _check_tag(tag)
    target = operation.host_target(tensor)
    transit = among.mail.receive(target, None if peer is None else among.number_of(peer, "peer"), tag)

    def finish(_: Any) -> int:
        operation.deliver(target, tensor)
        return among.ranks[transit.source]

    return Handle(among, transit, finish)


def _check_tag(tag: int) -> None:
    if not 0 <= tag <= MOST_TAG:
        raise ValueError(f"tag {tag}: give a number from 0 to 2**18")
