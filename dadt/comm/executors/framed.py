"""Messages with their length before them, for a library that writes past a tensor's end, or fills a part of it."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import torch

from dadt.errors import CommError, Mismatch

_BODY = 1 << 29
"""Tags of what follows a length: one for each message under way. The callers' are below."""
_HEADS = torch.int64
_LONGEST = 1 << 40
"""Most bytes of a message. A received length above this is refused, as that much memory would be allocated."""


class FramedMessages:
    """Sends and receives over a process group. What belongs to a length is known by the tag beside it, so receives of
    one tag stay in order though several are under way."""

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
        """Let go of the group."""
        self._group = None


class SentMessage:
    """A message that is being sent. It has the methods of a torch.distributed Work that Message needs."""

    def __init__(self, works: list[Any], head: torch.Tensor, rank: int) -> None:
        self._works = works
        self._head = head  # read until it is sent
        self._rank = rank

    def wait(self, timeout: timedelta) -> None:
        for work in self._works:
            work.wait(timeout)

    def _source_rank(self) -> int:
        return self._rank


class ReceivedMessage:
    """A message that is being received. It has the methods of a torch.distributed Work that Message needs."""

    def __init__(self, group: Any, work: Any, head: torch.Tensor, tensor: torch.Tensor, peer: int | None) -> None:
        self._group = group
        self._work = work
        self._head = head
        self._tensor = tensor
        self._peer = peer

    def wait(self, timeout: timedelta) -> None:
        """Raises Mismatch; the message has been taken, then, so that its sender ends."""
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
