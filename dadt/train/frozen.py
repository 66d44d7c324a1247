"""Decides which tensors have to be sent to other ranks: all tensors that are trained, and those other tensors whose
digests differ between ranks.

Tensors that an optimizer does not train (frozen parameters, buffers, a quantized model's packed weights and their
scales) are often most of a model, and every host has usually read them from an equal file already, so that sending them
would only cost time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from dadt.train.digest import digests

Digests = Sequence[int | None]
"""A digest for each tensor of a list of Parts, in order; None for tensors that are trained, which are always sent."""
SAID = 1 << 20
"""Smallest number of unsent bytes that is reported to the user."""
_DEEPEST = 2
"""Depth to which `quantization` searches nested objects for tensors."""


class Part(NamedTuple):
    """Tensors of one kind (weights, buffers or quantization data) that should be equal on all ranks."""

    what: str
    owners: list[torch.Tensor]
    """The script's parameters or buffers."""
    values: list[torch.Tensor]
    """The true (not predicted) values of `owners` on this rank."""

    @property
    def named(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(self.owners, self.values, strict=True)


def digests_of(parts: Iterable[Part], trained: Collection[int]) -> list[int | None]:
    """Return the digests of all parts' tensors, with None for tensors that are always sent. trained: ids of the
    parameters that are trained."""
    every = [(id(owner) not in trained and _is_plain(value), value) for part in parts for owner, value in part.named]
    found = iter(digests(value for compared, value in every if compared))
    return [next(found) if compared else None for compared, _ in every]


def _is_plain(value: torch.Tensor) -> bool:
    return value.layout == torch.strided and not value.is_quantized and value.device.type != "meta"


def to_send(ours: Digests, others: Iterable[Digests]) -> list[bool]:
    """Return, for each tensor, whether it has to be sent, because another rank needs it. All ranks compute equal
    results from equal digests. ours: digests of the rank that sends. others: digests of the ranks that receive."""
    every = list(others)
    if any(len(each) != len(ours) for each in every):
        return [True] * len(ours)  # the ranks' models differ, which the broadcast reports
    return [mine is None or any(each[i] != mine for each in every) for i, mine in enumerate(ours)]


def chosen(parts: Iterable[Part], flags: Sequence[bool]) -> list[Part]:
    """Return the parts with only those tensors for which the flag is set."""
    left, found = iter(flags), []
    for part in parts:
        pairs = [pair for pair in part.named if next(left, True)]
        found.append(Part(part.what, [owner for owner, _ in pairs], [value for _, value in pairs]))
    return found


class Spared(NamedTuple):
    """Numbers of bytes of untrained tensors that were equal on all ranks, and of those that were sent."""

    equal: int
    """Number of bytes that were not sent, because they were equal on all ranks."""
    sent: int

    @classmethod
    def of(cls, parts: Iterable[Part], ours: Digests, flags: Sequence[bool]) -> Spared:
        sizes = [value.numel() * value.element_size() for part in parts for value in part.values]
        compared = [(size, flag) for size, flag, mine in zip(sizes, flags, ours, strict=False) if mine is not None]
        return cls(sum(s for s, flag in compared if not flag), sum(s for s, flag in compared if flag))

    def sentence(self, name: str, first: int) -> str:
        """Return a line that tells the user how many bytes were not sent, because ranks had equal ones already; empty
        if fewer than SAID. name: suffix that names the optimizer. first: the rank whose tensors are sent."""
        if self.equal < SAID:
            return ""
        text = f"{readable(self.equal)} that are not trained{name} are equal on all ranks, so they are not sent"
        return f"{text}; {readable(self.sent)} differ, and are those of rank {first} now" if self.sent else text


def readable(count: int) -> str:
    """Return a number of bytes as readable text, such as "13.5 GB"."""
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    unit, size = next(((unit, size) for unit, size in units if count >= size), ("bytes", 1))
    return f"{count / size:.3g} {unit}" if size > 1 else f"{count} {unit}"


def quantization(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that belong to packed (integer) parameters, such as scales and code books, without which the
    parameters' values mean nothing. Libraries such as bitsandbytes store them in attributes of the parameters."""
    packed = [p for p in parameters if not (p.is_floating_point() or p.is_complex())]
    found = {id(t): t for p in packed for t in _attributes(p, 0) if t.data_ptr() != p.data_ptr()}
    return list(found.values())


def _attributes(value: Any, depth: int) -> Iterator[torch.Tensor]:
    for each in getattr(value, "__dict__", {}).values():
        if isinstance(each, torch.Tensor):
            yield each
        elif depth < _DEEPEST and not isinstance(each, nn.Module | type):
            yield from _attributes(each, depth + 1)
