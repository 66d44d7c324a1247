"""Messages preceded by their length, for libraries that would write past the end of a shorter tensor or fill only a
part of a longer one."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import torch

from dadt.errors import CommError, Mismatch

_BODY = 1 << 29
"""First tag for message bodies; every message in flight has a tag of its own. Callers' tags are below this number."""
_HEADS = torch.int64
_LONGEST = 1 << 40
"""Largest size of a message in bytes. If a header announces more, the message is refused, because the receiver would
have to allocate that memory."""


class FramedMessages:
    """Sends and receives over a process group. Each message's header holds its length and the tag of its body, so
    receives of one tag stay in order even if several are in flight."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group = group
        self._rank = rank
        self._numbers = itertools.count()

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> SentMessage:
        if peer == self._rank:
            raise ValueError(f"rank {peer} sends a message to itself: this executor has messages between ranks only")
        body = _BODY + next(self._numbers) % _BODY
        head = torch.tensor([tensor.nbytes, body], dtype=_HEADS, device="cpu")
        works = [self._group.send([head], peer, tag)]
        if tensor.nbytes:
            works.append(self._group.send([tensor], peer, body))
        return SentMessage(works, head, self._rank)

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int) -> ReceivedMessage:
        head = torch.zeros(2, dtype=_HEADS, device="cpu")
        if peer is None:
            return ReceivedMessage(self._group, self._group.recv_anysource([head], tag), head, tensor, None)
        return ReceivedMessage(self._group, self._group.recv([head], peer, tag), head, tensor, peer)

    def close(self) -> None:
        """Release the process group, so that its destructor can run."""
        self._group = None


class SentMessage:
    """A message being sent, with the methods of torch.distributed's Work that class C10dMessage uses."""

    def __init__(self, works: list[Any], head: torch.Tensor, rank: int) -> None:
        self._works = works
        self._head = head  # the header's memory must stay alive until it has been sent
        self._rank = rank

    def wait(self, timeout: timedelta) -> None:
        for work in self._works:
            work.wait(timeout)

    def _source_rank(self) -> int:
        return self._rank


class ReceivedMessage:
    """A message being received, with the methods of torch.distributed's Work that class C10dMessage uses."""

    def __init__(self, group: Any, work: Any, head: torch.Tensor, tensor: torch.Tensor, peer: int | None) -> None:
        self._group = group
        self._work = work
        self._head = head
        self._tensor = tensor
        self._peer = peer

    def wait(self, timeout: timedelta) -> None:
        """Wait for the message and check its length. If the tensor has another length, reads the message nevertheless,
        so that its sender does not wait, and raises Mismatch."""
        self._work.wait(timeout)
        length, tag = self._head.tolist()
        if not (0 <= length <= _LONGEST and _BODY <= tag < 2 * _BODY):
            raise CommError(f"rank {self._source_rank()} sent what is no message of DADT's")
        fits = length == self._tensor.nbytes
        target = self._tensor if fits else torch.empty(length, dtype=torch.uint8, device="cpu")
        if length:
            self._group.recv([target], self._source_rank(), tag).wait(timeout)
        if not fits:
            raise Mismatch(
                f"rank {self._source_rank()} sent a message of {length} bytes, and the tensor that it was to fill has"
                f" {self._tensor.nbytes}: send and receive tensors of one shape and dtype"
            )

    def _source_rank(self) -> int:
        return int(self._work._source_rank()) if self._peer is None else self._peer
