"""PowerGossip (arXiv:2008.01425): two ranks approximate the difference of their weights in few directions, found by
power iteration.

X(i) and X(j) are the n x m matrices of a tensor on the two ranks. V has few orthonormal columns of length m, equal on
both ranks. Each rank sends X V. Then both know D V, with D = X(j) - X(i), move by half of D V V' towards each other,
and orthonormalize D V. The result U, with columns of length n, is used in the next exchange, which sends X' U. Equal
weights cancel, so no copy of them is stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from dadt.algorithms.gossip.link_state import LinkState, half_way
from dadt.algorithms.gossip.snapshot import TensorLayout, WeightSnapshot
from dadt.comm.compression.base import WIDE
from dadt.comm.compression.powersgd import orthonormal

_ALIGNMENT = 64
_SEED = 2008_01425


class Matrix(NamedTuple):
    """A tensor's elements seen as a matrix, in the order of its memory."""

    rows: int
    columns: int
    rank: int
    """Number of columns that are sent in place of the tensor; 0 if the whole tensor is sent."""


class PowerGossip(LinkState):
    """Link state that sends low-rank products of each matrix, alternately with its rows and with its columns. Each rank
    computes the change of its weights itself, so both need the same kind of processor to get equal results."""

    def __init__(self, name: str, snapshot: WeightSnapshot, rank: int, asks: bool) -> None:
        super().__init__(name, snapshot)
        self._asks = asks
        self._dtypes = [kind.dtype for kind in snapshot.kinds]
        self._matrices = [_matrix(kind, rank) for kind in snapshot.kinds]
        self._bases = [
            _basis(torch.zeros(m.columns, m.rank, dtype=dtype, device="cpu"), 0) if m.rank else None
            for m, dtype in zip(self._matrices, self._dtypes, strict=True)
        ]

    @property
    def _by_columns(self) -> bool:
        """Whether the next message contains X' U (products with columns) instead of X V (products with rows)."""
        return self.number % 2 == 1

    @property
    def size(self) -> int:
        return max((place.stop for place in self._places()), default=0)

    def say(self, snapshot: WeightSnapshot, message: torch.Tensor) -> int:
        step = snapshot.step
        for index, place in enumerate(self._places()):
            flat, matrix, base = snapshot.read_tensor(index), self._matrices[index], self._bases[index]
            to = message[place].view(flat.dtype)
            if base is None:
                to.copy_(flat)
                continue
            values = flat.view(matrix.rows, matrix.columns)
            torch.mm(values.T if self._by_columns else values, base, out=to.view(-1, matrix.rank))
        return step

    def _settle(self, snapshot: WeightSnapshot, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        for index, place in enumerate(self._places()):
            own, other = (message[place].view(self._dtypes[index]) for message in (mine, theirs))
            base, rank = self._bases[index], self._matrices[index].rank
            if base is None:
                snapshot.add_to_tensor(index, half_way(own, other))
                continue
            # Both ranks compute this difference with the same sign, so that they get equal bases.
            found = (other - own if self._asks else own - other).view(-1, rank)
            half = half_way(own, other).view(-1, rank)
            moved = base @ half.T if self._by_columns else half @ base.T
            snapshot.add_to_tensor(index, moved.view(-1))
            self._bases[index] = _basis(found, self.number + 1)

    def _places(self) -> Iterator[slice]:
        """Yield the range of bytes of each tensor in the next message."""
        end = 0
        for matrix, dtype in zip(self._matrices, self._dtypes, strict=True):
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            side = matrix.columns if self._by_columns else matrix.rows
            end = start + (side * matrix.rank or matrix.rows * matrix.columns) * dtype.itemsize
            yield slice(start, end)


def _matrix(kind: TensorLayout, rank: int) -> Matrix:
    """Return the tensor as a matrix whose rows are its outermost dimension in memory. Vectors, and matrices too small
    for `rank` columns, will be sent as they are."""
    total = math.prod(kind.shape)
    if len(kind.shape) < 2 or not total or kind.dtype not in WIDE:
        return Matrix(1, total, 0)
    rows = max(zip(kind.stride, kind.shape, strict=True))[1]
    columns = total // rows
    rank = min(rank, rows, columns)
    return Matrix(rows, columns, rank if rank * (rows + columns) < total else 0)


def _basis(found: torch.Tensor, number: int) -> torch.Tensor:
    """Return orthonormal columns that span the columns of `found`. Where these span too little or are not finite,
    random columns, the same on all ranks, are added. number: number of the exchange that will use the columns, by which
    the random ones are seeded."""
    basis = orthonormal(found) if bool(found.isfinite().all()) else torch.zeros_like(found)
    empty = basis.eq(0).all(0)
    if bool(empty.any()):
        generator = torch.Generator().manual_seed(_SEED + number)
        spare = torch.randn(basis.shape, generator=generator, dtype=basis.dtype, device="cpu")
        basis = orthonormal(torch.where(empty, spare, basis))
    return basis
