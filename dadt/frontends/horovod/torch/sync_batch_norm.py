"""BatchNorm that uses the statistics of all ranks' batches together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm

from dadt.frontends.horovod.torch import place
from dadt.frontends.horovod.torch.gradients import allgather, allreduce
from dadt.frontends.horovod.torch.reduce_op import ReduceOp

if TYPE_CHECKING:
    from torch import Tensor


class SyncBatchNorm(_BatchNorm):
    """BatchNorm for inputs with any number of dimensions, on CPU or GPU, over the batches of all ranks. Arguments are
    those of torch.nn.BatchNorm1d."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each channel (dimension 1) over all other dimensions and all ranks."""
        self._check_input_dim(input)
        if (not self.training and self.track_running_stats) or place.size() == 1:
            return super().forward(input)
        output, mean, variance, count = cast(Any, _Normalize).apply(input, self.weight, self.bias, self.eps)
        if self.track_running_stats:
            self._track(mean, variance, float(count))
        result: Tensor = output
        return result

    def _track(self, mean: Tensor, variance: Tensor, count: float) -> None:
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        rate = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
            unbiased = variance * (count / max(count - 1, 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)


class _Normalize(Function):
    """Normalization by the statistics of all ranks, with its gradient. Gradients of weight and bias are those of this
    rank's batch, as in torch."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
        values = input.detach().float() if input.element_size() < 4 else input.detach()
        others = [d for d in range(values.dim()) if d != 1]
        shape = [1, -1, *[1] * (values.dim() - 2)]
        mean, variance, count = _statistics(values, others)
        inverse = (variance + eps).rsqrt()
        normal = (values - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normal, inverse, weight)
        ctx.others, ctx.shape, ctx.count = others, shape, count
        output = normal if weight is None or bias is None else normal * weight.view(shape) + bias.view(shape)
        counted = torch.tensor(count, dtype=torch.float64, device="cpu")
        ctx.mark_non_differentiable(mean, variance, counted)
        return output.to(input.dtype), mean, variance, counted

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        normal, inverse, weight = ctx.saved_tensors
        gradient = gradients[0].to(normal.dtype)
        sums = torch.stack([gradient.sum(ctx.others), (gradient * normal).sum(ctx.others)])
        of_input = None
        if ctx.needs_input_grad[0]:
            of_all = allreduce(sums, op=ReduceOp.Sum) / ctx.count
            scale = inverse if weight is None else inverse * weight
            centred = gradient - of_all[0].view(ctx.shape) - normal * of_all[1].view(ctx.shape)
            of_input = (centred * scale.view(ctx.shape)).to(gradients[0].dtype)
        if weight is None:
            return of_input, None, None, None
        return of_input, sums[1].to(weight.dtype), sums[0].to(weight.dtype), None


def _statistics(values: Tensor, others: list[int]) -> tuple[Tensor, Tensor, float]:
    """Return mean and variance of each channel over all ranks, and the number of values per channel. Differences from
    the rank's own mean are squared, so that little precision is lost where means are large."""
    count = values.numel() / values.shape[1]
    mean = values.mean(others) if count else values.new_zeros(values.shape[1])
    squares = (values - mean.view([1, -1, *[1] * (values.dim() - 2)])).square().sum(others)
    own = torch.stack([torch.full_like(mean, count), mean, squares])
    counts, means, all_squares = allgather(own.unsqueeze(0)).unbind(1)
    total = counts.sum(0)
    of_all = (counts * means).sum(0) / total
    variance = (all_squares + counts * (means - of_all).square()).sum(0) / total
    return of_all, variance, float(total[0])
