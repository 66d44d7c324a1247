"""Scales averaged gradients for the script, which may clip them before the optimizer's step, while ranks exchange
momentum. Gradients computed from a momentum of few bits have many times the norm of the true average, because of
noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from dadt.train.algorithm import Attached
from dadt.train.moment import beside
from dadt.train.norm import norms, together


class ShownGradients:
    """Scales averaged gradients, until the optimizer steps, to the norm that uncompressed averages would have, which
    ranks estimate from their own gradients. Measures by how much the script clips them. Does nothing until the script
    uses averages before a step."""

    def __init__(self, attachment: Attached) -> None:
        self._attachment = attachment
        self.early = False
        """Whether the script has used averages before the optimizer's step."""
        self.square = math.nan
        """This rank's part of the squared norm of the averaged gradient; NaN if it is not known."""
        self.clip: torch.Tensor | float | None = None
        """Factor by which the script has changed the norm of the last averages; None if it has used none."""
        self._factor: torch.Tensor | None = None
        """Factor by which gradients are multiplied for the script; None if the script sees the gradients that the
        optimizer needs."""
        self._norm: torch.Tensor | None = None
        """Norm of the gradients that the script sees, before it changes them."""

    def measure(self, factors: Mapping[torch.Tensor, float]) -> None:
        """Estimate this rank's part of the averaged gradient's squared norm. Called while `.grad` contains this rank's
        own gradients. factors: for each parameter, the ratio of the squared norm of an averaged gradient to that of one
        rank's gradient."""
        self.square = 0.0 if self.early and factors else math.nan
        rows = [(p.grad, f) for p, f in factors.items() if p.grad is not None] if self.early else []
        if rows:
            found = norms([g if g.layout is torch.strided else g.to_dense() for g, _ in rows])
            squares = torch.stack([n.double().cpu() for n in found]).square()
            scale = 1.0 if self._attachment.scale is None else float(self._attachment.scale)
            total = (
                float((squares * torch.tensor([f for _, f in rows], dtype=torch.float64, device="cpu")).sum())
                / scale**2
            )
            self.square = total if math.isfinite(total) else math.nan

    def ratio(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], square: float, scale: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the factor by which averages are multiplied before the script sees them; None for no factor. pairs:
        parameters with their averaged gradients. square: squared norm that the script should see, 0 if not known.
        scale: loss scale of the averages."""
        self._factor = self._norm = None
        if not (self.early and pairs):
            return None
        norm = together(norms([g for _, g in pairs]))
        if square:
            wanted = math.sqrt(square) * (1.0 if scale is None else beside(scale, norm))
            self._factor = torch.where(norm > 0, wanted / norm, 1.0)
            norm = norm * self._factor
        self._norm = norm if scale is None else norm / beside(scale, norm)
        return self._factor

    def _gradients(self) -> Iterator[torch.Tensor]:
        return (p.grad for p in self._attachment.parameters if p.grad is not None)

    @torch.no_grad()
    def before_step(self) -> None:
        """Measure by how much the script has clipped the averages, and restore the scale that the optimizer needs.
        Called when the optimizer is about to step."""
        gradients = list(self._gradients())
        if self._norm is None or not gradients:
            return
        now = together(norms(gradients))
        if (scaled := getattr(self._attachment.optimizer, "grad_scale", None)) is not None:
            now = now / beside(scaled, now)  # a fused optimizer removes the loss scale itself
        clip = now / beside(self._norm, now)
        self.clip = torch.where(torch.isfinite(clip), clip, 1.0)
        if self._factor is not None:
            for g in gradients:
                g.div_(beside(self._factor, g))

    @torch.no_grad()
    def stepped(self) -> None:
        """Scale the averages for the script again. Called when the optimizer has stepped."""
        if self._factor is not None:
            for g in self._gradients():
                g.mul_(beside(self._factor, g))
        self._factor = self._norm = None
