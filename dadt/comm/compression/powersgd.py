"""PowerSGD (arXiv:1905.13727): each matrix is sent as two thin matrices, computed by one step of power iteration.

M (n x m) is approximated by P Q', where P is the orthonormalised mean of M Q over ranks, and Q then the mean of M' P.
An exchange thus needs two allreduces, the second after the first. The next step's iteration starts from the Q of this
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dadt.comm.bucket import Bucket, Staged
from dadt.comm.compression.feedback import Owing
from dadt.comm.compression.half import narrowed

_DEPENDENT = 1e-4
"""A column counts as linearly dependent on earlier columns if subtracting its projections on them leaves at most this
share of its norm, because such a small remainder is mere rounding error."""
_SEED = 1905_13727
Learned = tuple[torch.Tensor, torch.Tensor | None]
"""Result of averaging one matrix: the mean of Q over ranks, and this rank's error, the part of its own matrix that P Q'
does not represent. The error is None if the rank had no gradient or one of weight 0."""


class LowRank(Owing):
    """PowerSGD state of one bucket: which tensors are approximated as matrices, the start values of the next iteration,
    and this rank's residuals.

    A tensor counts as a matrix of its first dimension by all others. Vectors, and matrices that approximation would not
    make smaller, travel unchanged. Ranks must have the same kind of processor, since each computes the product P Q'
    itself and the results must agree. 16-bit gradients travel as 32-bit floats, so that sums are not rounded.
    """

    def __init__(self, bucket: Bucket, rank: int) -> None:
        super().__init__()
        self.bucket = bucket
        self._dtype = dtype = torch.float32 if bucket.dtype.itemsize == 2 else bucket.dtype
        grows = dtype.itemsize // bucket.dtype.itemsize
        shapes = [_as_matrix(t) for t in bucket.parts]
        ranks = [min(rank, n, m) for n, m in shapes]
        saved = [n * m - grows * r * (n + m) for (n, m), r in zip(shapes, ranks, strict=True)]
        self.matrices = [i for i, values in enumerate(saved) if values > 0]
        """Indices of the bucket's tensors that are sent as low-rank approximations."""
        whole = sum(t.numel() for i, t in enumerate(bucket.parts) if i not in self.matrices)
        if sum(saved[i] for i in self.matrices) <= (grows - 1) * whole:
            self.matrices = []
        self._shapes = [shapes[i] for i in self.matrices]
        self._ranks = [ranks[i] for i in self.matrices]
        if not self.matrices:
            return
        first = [torch.empty_like(t, dtype=dtype) for t in bucket.parts]
        for i, (n, _), r in zip(self.matrices, self._shapes, self._ranks, strict=True):
            first[i] = torch.empty(n, r, dtype=dtype, device=bucket.device)
        second = [
            torch.empty(m, r, dtype=dtype, device=bucket.device)
            for (_, m), r in zip(self._shapes, self._ranks, strict=True)
        ]
        self.first = Bucket(first, bucket.direct, bucket.turns)
        """Bucket of the first allreduce: P of each approximated matrix, and the tensors that travel unchanged."""
        self.second = Bucket(second, bucket.direct, bucket.turns)
        """Bucket of the second allreduce: Q of each approximated matrix."""
        self.owed: list[torch.Tensor | None] = [None] * len(self.matrices)
        self.bases = self._begin()
        self.epoch = 0

    def _begin(self) -> list[torch.Tensor]:
        """Return the start values of the first iteration, which are random but equal on all ranks."""
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
        """Store the residuals and the start values of the next iteration, after one averaging."""
        with torch.no_grad():
            for k, (mean, lost) in enumerate(learned):
                # An infinite gradient reaches all ranks; residuals and start values must stay finite. A column of zeros
                # would stay zero in every later iteration.
                useful = mean.isfinite().all() & mean.ne(0).any(0, keepdim=True)
                self.bases[k] = torch.where(useful, mean, self.bases[k])
                if lost is not None:
                    owed = self.owed[k]
                    # Under the algorithm `pipe` the next exchange has already started with its residual, so this error
                    # is added to the residual of the exchange after it.
                    self.owed[k] = lost if owed is None else owed + lost

    def owes(self, index: int) -> torch.Tensor | None:
        """Return the residual of the bucket's tensor `index`, in its shape; None if there is none. Call only while no
        exchange is in progress."""
        owed = self.owed[self.matrices.index(index)] if index in self.matrices else None
        return None if owed is None else owed.view(self.bucket.parts[index].shape)

    def begin(
        self, gradients: Sequence[torch.Tensor | None], scale: torch.Tensor | None, turn: int, counts: bool = True
    ) -> Round:
        """Start one exchange. scale: loss scale of the gradients. turn: flat buffer to use. counts: whether this rank's
        weight is not 0; with weight 0, gradients may be non-finite and the residuals stay unchanged."""
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
                # A copy, because the script may change its gradients before the second allreduce.
                matrix = dense.detach().reshape(shape).to(self._dtype, copy=True)
                if counts:
                    if owed is not None:
                        matrix += owed
                    self.owed[k] = None
                taken.append(matrix)
        return Round(self, list(gradients), taken, turn, counts)


class Round:
    """One averaging of one bucket by PowerSGD. `staged` is the input of the first allreduce, and `then` is the input of
    the second.

    `halfway` may run on another thread, because it uses nothing that the start of the next averaging changes.
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
        """Input of the second allreduce. In host memory, the caller may submit these tensors before `halfway` has
        filled them."""
        return self.form.second.stage(list(self._own), self._turn)

    def halfway(self) -> None:
        """Compute the input of the second allreduce from the result of the first."""
        form = self.form
        with torch.no_grad():
            self._bases = [orthonormal(form.first.deliver(i, self._turn)) for i in form.matrices]
            for matrix, basis, own in zip(self._taken, self._bases, self._own, strict=True):
                if matrix is not None and own is not None:
                    torch.mm(matrix.T, basis, out=own)

    def finish(self) -> None:
        """Write the averages into the bucket's flat buffer, once the second allreduce is done."""
        form, turn = self.form, self._turn
        places, place_dtype = form.bucket.views[turn], form.bucket.dtype
        with torch.no_grad():
            for i, place in enumerate(places):
                if i not in form.matrices:
                    place.copy_(form.first.deliver(i, turn))
            for k, i in enumerate(form.matrices):
                mean = form.second.deliver(k, turn)
                product = (self._bases[k] @ mean.T).view(form.bucket.parts[i].shape)
                places[i].copy_(narrowed(product, place_dtype) if product.dtype != place_dtype else product)

    def learn(self) -> None:
        """Store the residuals and the next start values. Call once after `finish`, on all ranks between the same two
        averagings."""
        if self._epoch == self.form.epoch:
            self.form.learn(self.learned())
        self._taken, self._own = [], []

    def learned(self) -> list[Learned]:
        """Return the mean of Q and this rank's error for each matrix. Call after `finish`."""
        with torch.no_grad():
            return [self._learned(k, self.form.second.deliver(k, self._turn)) for k in range(len(self._taken))]

    def _learned(self, k: int, mean: torch.Tensor) -> Learned:
        matrix, own = self._taken[k], self._own[k]
        if matrix is None or own is None or not self._counts:
            return mean, None
        return mean, torch.where(mean.isfinite().all(), matrix - self._bases[k] @ own.T, 0.0)


def _as_matrix(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the rows and columns of the tensor seen as a matrix; (0, 0) for vectors and empty tensors."""
    if tensor.dim() < 2 or not tensor.numel():
        return 0, 0
    return tensor.shape[0], tensor.numel() // tensor.shape[0]


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix with columns made orthonormal by modified Gram-Schmidt. Columns that depend on earlier ones
    become zero."""
    columns = list(matrix.unbind(1))
    least = matrix.norm(dim=0) * _DEPENDENT
    for i, column in enumerate(columns):
        norm = column.norm()
        column = torch.where(norm <= least[i], 0.0, column / norm)
        columns[i] = column
        for j in range(i + 1, len(columns)):
            columns[j] = columns[j] - (columns[j] @ column) * column
    return torch.stack(columns, 1)
