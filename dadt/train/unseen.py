"""Weights whose gradients have all been exactly 0 so far, such as the padding row of an embedding or weights behind a
mask. A compression to one or two bits has no 0, so it would give them a momentum as large as their neighbours'."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch

from dadt.comm.compression import INT8
from dadt.train.moment import forget_others, moments_of, state_of
from dadt.train.ranks import Ranks

_AT_ONCE = 1 << 22
"""Number of weights of which ranks tell each other at a time, so that this takes little memory."""


class UnseenWeights:
    """For each parameter with such weights, a mask of them, which is equal on all ranks."""

    def __init__(self) -> None:
        self.masks: dict[torch.Tensor, torch.Tensor] = {}
        self._seen: dict[torch.Tensor, torch.Tensor] = {}
        """Where this rank's own gradients were not 0: until `begin` of all parameters, and then of the same ones."""
        self._since_start = False
        """Whether `_seen` is of all steps of the training."""

    @torch.no_grad()
    def begin(self, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
        """Find weights for which the optimizer's state is 0, or may contain weight decay alone. Those that
        had gradients nonetheless, which were rounded to 0, are left out. All ranks call this together."""
        self.masks = {}
        decays = []
        for moment, parameters in moments_of(optimizer):
            for p in parameters:
                state = state_of(optimizer, p)
                m, v = (state.get(name) for name in (moment.first, "exp_avg_sq"))
                if m is not None:
                    mask = m == 0 if v is None else (m == 0) & (v == 0)
                    if mask.any():
                        self.masks[p] = mask
                    if moment.decay:
                        decays.append(p)
        whole = all(ranks.collect("whether gradients were noted from the start", self._since_start))
        more = {p: torch.ones_like(p, dtype=torch.bool) for p in decays} if whole else {}
        self.masks = self._unseen_by(ranks, {**self.masks, **more})
        self.follow(self.masks)

    def see(self, parameters: Iterable[torch.Tensor], *, first: bool = False) -> None:
        """Note where this rank's own gradients of these parameters, which `.grad` contains, are not 0. first: whether
        the optimizer has made no step."""
        self._since_start |= first
        for p in parameters:
            if p.grad is not None:
                gradient = p.grad if p.grad.layout is torch.strided else p.grad.to_dense()
                found = (gradient != 0) & gradient.isfinite()  # steps with infinite gradients are skipped
                self._seen[p] = self._seen[p] | found if p in self._seen else found

    def share(self, ranks: Ranks) -> None:
        """Release the weights for which any rank has noted a gradient. All ranks call this together."""
        self.masks = self._unseen_by(ranks, self.masks)
        forget_others(self._seen, self.masks)

    def _unseen_by(self, ranks: Ranks, masks: Mapping[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Return the masks without the weights for which any rank has noted a gradient. If this raises CommError,
        nothing has changed."""
        parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        room, found = 0, []
        for p, mask in masks.items():
            if mask.numel() > room:
                parts.append([])
                room = _AT_ONCE
            parts[-1].append((p, mask))
            room -= mask.numel()
        for some in parts:
            seen = [
                self._seen[p][mask].float() if p in self._seen else torch.zeros_like(p[mask], dtype=torch.float32)
                for p, mask in some
            ]
            ranks.average(seen, "which weights have had gradients", codec=INT8)
            for (p, mask), each in zip(some, seen, strict=True):
                left = mask.clone()
                left[mask] = each == 0
                found.append((p, left))
        return {p: mask for p, mask in found if mask.any()}

    def held(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Return gradients with 0 at these weights, as copies where there are any."""
        given = {p: (mean, self.masks.get(p)) for p, mean in gradients.items()}
        return {p: g if m is None else g.masked_fill(m.to(g.device), 0) for p, (g, m) in given.items()}

    def hold(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Set the gradient of these weights to 0, in place."""
        if parameter in self.masks:
            gradient.masked_fill_(self.masks[parameter], 0)

    def follow(self, parameters: Container[torch.Tensor]) -> None:
        """Forget all other parameters."""
        forget_others(self.masks, parameters)
        forget_others(self._seen, parameters)

    def state(self, numbers: Mapping[torch.Tensor, int]) -> dict[int, torch.Tensor]:
        """Return the masks by the parameters' numbers, for a checkpoint."""
        return {numbers[p]: mask.clone() for p, mask in self.masks.items() if p in numbers}

    def load_state(self, state: Mapping[int, torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        self.masks = {parameters[i]: m.to(parameters[i].device) for i, m in state.items() if i < len(parameters)}
        self._seen, self._since_start = {}, False

    def observe(self, parameters: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return what this rank alone has noted, for a snapshot."""
        return {"seen": [self._seen.get(p) for p in parameters], "since_start": self._since_start}

    def restore(self, own: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        """Continue from a snapshot. own: what `observe` returned."""
        every = zip(parameters, own["seen"], strict=True)
        self._seen = {p: noted.to(p.device) for p, noted in every if noted is not None}
        self._since_start = own["since_start"]
