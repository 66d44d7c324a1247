"""PowerSGD (arXiv:1905.13727): a matrix travels as two thin ones, by one step of power iteration.

M (n x m) is approximated by P Q', with P = the orthonormalised mean of M Q over ranks, and then Q = the mean of M' P:
two allreduces, of which the second needs the first. Q of one step is where the next one begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dadt.comm.bucket import Bucket, Staged
from dadt.comm.compression.feedback import Owing
from dadt.comm.compression.half import narrowed

_DEPENDENT = 1e-4
"""A column whose rest is at most this share of its norm, once the columns before are taken out, is rounding error."""
_SEED = 1905_13727
Learned = tuple[torch.Tensor, torch.Tensor | None]
"""What one averaging of a matrix leaves: the mean of Q over ranks, and this rank's error, the part of its own matrix
that P Q' does not represent. The error is None if the rank had no gradient, or one of weight 0."""


class LowRank(Owing):
    """One bucket's matrices: where they are, where the next iteration begins, and what this rank owes of them.

    A tensor counts as a matrix of its first dimension by all others. Where two thin ones are not smaller, and for
    vectors, it travels as it is. Ranks must have processors of one kind: the product is computed on each. Of gradients
    of 16 bits all has 32 on the way, so that sums are not rounded.
    """

    def __init__(self, bucket: Bucket, rank: int) -> None:
        super().__init__()
        self.bucket = bucket
        self._dtype = dtype = torch.float32 if bucket.dtype.itemsize == 2 else bucket.dtype
        grows = dtype.itemsize // bucket.dtype.itemsize
        shapes = [_as_matrix(t) for t in bucket.tensors]
        ranks = [min(rank, n, m) for n, m in shapes]
        saved = [n * m - grows * r * (n + m) for (n, m), r in zip(shapes, ranks, strict=True)]
        self.matrices = [i for i, values in enumerate(saved) if values > 0]
        """Numbers of the bucket's tensors that are approximated."""
        whole = sum(t.numel() for i, t in enumerate(bucket.tensors) if i not in self.matrices)
        if sum(saved[i] for i in self.matrices) <= (grows - 1) * whole:
            self.matrices = []
        self._shapes = [shapes[i] for i in self.matrices]
        self._ranks = [ranks[i] for i in self.matrices]
        if not self.matrices:
            return
        first = [torch.empty_like(t, dtype=dtype) for t in bucket.tensors]
        for i, (n, _), r in zip(self.matrices, self._shapes, self._ranks, strict=True):
            first[i] = torch.empty(n, r, dtype=dtype, device=bucket.device)
        second = [
            torch.empty(m, r, dtype=dtype, device=bucket.device)
            for (_, m), r in zip(self._shapes, self._ranks, strict=True)
        ]
        self.first = Bucket(first, bucket.direct, bucket.turns)
        """P of each matrix, and what travels as it is."""
        self.second = Bucket(second, bucket.direct, bucket.turns)
        """Q of each matrix."""
        self.owed: list[torch.Tensor | None] = [None] * len(self.matrices)
        self.bases = self._begin()
        self.epoch = 0

    def _begin(self) -> list[torch.Tensor]:
        """Where the first iteration begins: random, and equal on all ranks."""
        generator = torch.Generator().manual_seed(_SEED)
        sizes = [(m, r) for (_, m), r in zip(self._shapes, self._ranks, strict=True)]
        return [
            torch.randn(s, generator=generator, dtype=torch.float32, device="cpu").to(self.bucket.device, self._dtype)
            for s in sizes
        ]

    def forget(self) -> None:
        super().forget()
        self.epoch += 1
        self.owed = [None] * len(self.matrices)
        self.bases = self._begin()

    def observe(self) -> dict[str, Any]:
        return {**super().observe(), "owed": list(self.owed), "bases": list(self.bases)}

    def restore(self, own: dict[str, Any]) -> None:
        super().restore(own)
        self.owed = [None if t is None else t.to(self.bucket.device) for t in own["owed"]]
        self.bases = [t.to(self.bucket.device) for t in own["bases"] if t is not None]

    def learn(self, learned: Sequence[Learned]) -> None:
        """One averaging is over: keep what was lost, and where the next iteration begins."""
        with torch.no_grad():
            for k, (mean, lost) in enumerate(learned):
                # Infinity in a gradient reaches all ranks, and neither what is owed nor the next beginning. A column of
                # zeros would stay one for ever.
                useful = mean.isfinite().all() & mean.ne(0).any(0, keepdim=True)
                self.bases[k] = torch.where(useful, mean, self.bases[k])
                if lost is not None:
                    owed = self.owed[k]
                    # With `pipe` the exchange after this one has begun: what is lost here goes with the next but one.
                    self.owed[k] = lost if owed is None else owed + lost

    def owes(self, index: int) -> torch.Tensor | None:
        """The residual of one tensor of the bucket, in its shape; None if there is none. No exchange is under way."""
        owed = self.owed[self.matrices.index(index)] if index in self.matrices else None
        return None if owed is None else owed.view(self.bucket.tensors[index].shape)

    def begin(
        self, gradients: Sequence[torch.Tensor | None], scale: torch.Tensor | None, turn: int, counts: bool = True
    ) -> Round:
        """One exchange. scale: the loss scale that the gradients carry. counts: their weight is not 0; where it is,
        they may be no numbers, and what this rank owes stays as it is."""
        keep = self.keep(scale)
        taken: list[torch.Tensor | None] = []
        with torch.no_grad():
            for k, (i, shape) in enumerate(zip(self.matrices, self._shapes, strict=True)):
                gradient, owed = gradients[i], self.owed[k]
                self.owed[k] = owed = None if owed is None else owed * keep
                if gradient is None:
                    taken.append(None)
                    continue
                dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
                # In memory of its own: the script may change its gradients before the second half.
                matrix = dense.detach().reshape(shape).to(self._dtype, copy=True)
                if counts:
                    if owed is not None:
                        matrix += owed
                    self.owed[k] = None
                taken.append(matrix)
        return Round(self, list(gradients), taken, turn, counts)


class Round:
    """One averaging of one bucket: `staged` goes with the first allreduce, `then` with the second.

    `halfway` may run on another thread: it touches nothing that the next averaging's beginning does.
    """

    def __init__(
        self,
        form: LowRank,
        gradients: list[torch.Tensor | None],
        taken: list[torch.Tensor | None],
        turn: int,
        counts: bool,
    ) -> None:
        self.form = form
        self._counts = counts
        self._taken = taken
        self._turn = turn
        self._epoch = form.epoch
        self._bases: list[torch.Tensor] = []
        self._own = [None if t is None else torch.empty_like(b) for t, b in zip(taken, form.bases, strict=True)]
        with torch.no_grad():
            for i, matrix, base in zip(form.matrices, taken, form.bases, strict=True):
                gradients[i] = None if matrix is None else matrix @ base
        self.staged: Staged = form.first.stage(gradients, turn)

    @property
    def then(self) -> Staged:
        """The second round's tensor. In host memory it is there from the beginning, and `halfway` writes it."""
        return self.form.second.stage(list(self._own), self._turn)

    def halfway(self) -> None:
        """The first allreduce is done: make what goes with the second."""
        form = self.form
        with torch.no_grad():
            self._bases = [orthonormal(form.first.deliver(i, self._turn)) for i in form.matrices]
            for matrix, basis, own in zip(self._taken, self._bases, self._own, strict=True):
                if matrix is not None and own is not None:
                    torch.mm(matrix.T, basis, out=own)

    def finish(self) -> None:
        """The second one is done: put the averages in their places."""
        form, turn = self.form, self._turn
        places, place_dtype = form.bucket.views[turn], form.bucket.dtype
        with torch.no_grad():
            for i, place in enumerate(places):
                if i not in form.matrices:
                    place.copy_(form.first.deliver(i, turn))
            for k, i in enumerate(form.matrices):
                mean = form.second.deliver(k, turn)
                product = (self._bases[k] @ mean.T).view(form.bucket.tensors[i].shape)
                places[i].copy_(narrowed(product, place_dtype) if product.dtype != place_dtype else product)

    def learn(self) -> None:
        """Keep what this averaging leaves. Call it once after `finish`, on all ranks between the same two
        averagings."""
        if self._epoch == self.form.epoch:
            self.form.learn(self.learned())
        self._taken, self._own = [], []

    def learned(self) -> list[Learned]:
        """What the averaging leaves for each matrix, after `finish`: `learn` goes by it."""
        with torch.no_grad():
            return [self._learned(k, self.form.second.deliver(k, self._turn)) for k in range(len(self._taken))]

    def _learned(self, k: int, mean: torch.Tensor) -> Learned:
        matrix, own = self._taken[k], self._own[k]
        if matrix is None or own is None or not self._counts:
            return mean, None
        return mean, torch.where(mean.isfinite().all(), matrix - self._bases[k] @ own.T, 0.0)


def _as_matrix(tensor: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of the tensor as a matrix; (0, 0) for vectors and empty tensors."""
    if tensor.dim() < 2 or not tensor.numel():
        return 0, 0
    return tensor.shape[0], tensor.numel() // tensor.shape[0]


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Columns made orthonormal by modified Gram-Schmidt; zeros where they depend on those before."""
    columns = list(matrix.unbind(1))
    least = matrix.norm(dim=0) * _DEPENDENT
    for i, column in enumerate(columns):
        norm = column.norm()
        column = torch.where(norm <= least[i], 0.0, column / norm)
        columns[i] = column
        for j in range(i + 1, len(columns)):
            columns[j] = columns[j] - (columns[j] @ column) * column
    return torch.stack(columns, 1)
