"""Second moments v(i) of each rank's own gradients, from which ranks compute a common v for Adam:

    v = f * (mean over ranks of sqrt(v(i)))^2, every REFRESH steps

where f, a number for each tensor, is the ratio of the second moment of averaged gradients to that of own ones. It is
measured while ranks still average gradients. If they exchange momentum from then on, f follows what samples of their
gradients show: early in training these are alike, so that f is near to 1, and later mostly noise, so that it falls to
1 / ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dadt.comm.compression import INT8
from dadt.train.algorithm import Attached
from dadt.train.moment import Moment, beside, forget_others, moments_of, state_of, wide
from dadt.train.restored import numbers_of

REFRESH = 50
"""Number of steps from one refresh of the second moment v to the next."""
_SAMPLED, _EVERY = 2048, 5
"""Number of values of each tensor that are sampled between two refreshes, and the number of steps between samples."""
_ROWS = REFRESH // _EVERY
_FEWEST = 10
"""Fewest steps whose samples change factors."""


class OwnMoments:
    """One rank's own second moments of one optimizer's gradients, and the factors by which their mean becomes the v of
    all ranks."""

    def __init__(self, attachment: Attached) -> None:
        self._attachment = attachment
        self._of: dict[torch.Tensor, torch.Tensor] = {}
        self._taken: dict[torch.Tensor, int] = {}
        """For each parameter, the number of gradients in this rank's own second moment."""
        self.factors: dict[torch.Tensor, float] = {}
        """For each parameter, the ratio of all ranks' v to the mean of the ranks' own v; empty if not measured."""
        self.sums: dict[torch.Tensor, float] = {}
        """For each parameter, the sum over the mean of the ranks' own v at the last refresh."""
        self._samples: dict[torch.Tensor, torch.Tensor] = {}
        """For each parameter, values of this rank's gradients in the last REFRESH steps, at places that all ranks know:
        a row for each step that was sampled."""
        self._apart = False
        """Whether this rank has stepped alone, so that the optimizer's v is not of averages any more."""
        self._since = 0
        """Step since which this rank has sampled its gradients."""

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        return state_of(self._attachment.optimizer, parameter)

    @property
    def _parameters(self) -> list[torch.Tensor]:
        return list(numbers_of(self._attachment.optimizer))

    def add(self, scale: torch.Tensor | None, clip: torch.Tensor | float | None, *, alone: bool) -> None:
        """Add this rank's own gradients, which `.grad` contains. scale: their loss scale. clip: factor by which the
        script clips averages; None if it clips none. alone: as in `share`."""
        step, self._apart = self._attachment.step, alone
        for moment, parameters in moments_of(self._attachment.optimizer):
            there = [p for p in parameters if p.grad is not None]
            sampling = not alone and step % _EVERY == 0
            if not there or not (moment.beta2 or sampling):
                continue
            gradients = _decayed([wide(p.grad) for p in there], there, moment, scale, clip)
            if moment.beta2:
                for p, g in zip(there, gradients, strict=True):
                    if p not in self._of:
                        self._of[p] = torch.zeros_like(g)
                    self._taken[p] = self._taken.get(p, 0) + 1
                own = [self._of[p] for p in there]
                torch._foreach_mul_(own, moment.beta2)
                torch._foreach_addcmul_(own, gradients, gradients, 1 - moment.beta2)
            for p, g in zip(there, gradients, strict=True) if sampling else ():
                self._sample(p, g)

    def _sample(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Note some values of the gradient, at other places in each step."""
        if parameter not in self._samples:
            self._samples[parameter] = _no_samples(parameter)
        number, values = self._attachment.step // _EVERY, gradient.flatten()
        row = self._samples[parameter][number % _ROWS]
        apart = max(1, len(values) // max(1, len(row)))
        some = values[number % apart :: apart][: len(row)]
        row[: len(some)] = some

    @torch.no_grad()
    def share(self, *, alone: bool) -> None:
        """Set v to the mean of the ranks' own second moments, times the tensors' factors, which follow the samples. For
        tensors whose factor is not known, measure the factor and leave v. All ranks call this together. alone: whether
        ranks step alone. Then others may train a parameter that this one does not, and factors stay as they are, since
        following samples of gradients at other weights has not helped; tensors without a factor get the others' mean,
        as no rank has a v of averages. Without v the factors are those of the samples alone."""
        rows: list[tuple[Moment, torch.Tensor, torch.Tensor | None, torch.Tensor]] = []
        sampled: list[torch.Tensor] = []
        for moment, parameters in moments_of(self._attachment.optimizer):
            for p in parameters:
                state = self._state(p)
                if not alone and state.get(moment.first) is not None:
                    sampled.append(p)
                if not moment.beta2 or "exp_avg_sq" not in state:
                    if moment.beta2 and alone and p.requires_grad:
                        rows.append((moment, p, None, torch.zeros_like(wide(p))))
                    continue
                v, rest = wide(state["exp_avg_sq"]), 1 - moment.beta2 ** state["step"]
                v = v / torch.as_tensor(rest, dtype=v.dtype, device=v.device).clamp_min(1e-12)
                own, count = self._of.get(p), 1 - moment.beta2 ** self._taken.get(p, 0)
                mine = v / self.factors.get(p, 1.0)
                if own is not None:
                    own.copy_(torch.where(own.isfinite(), own, mine * count))  # the script may have skipped such a step
                    mine = own / count
                rows.append((moment, p, v, mine.sqrt_()))
        if not rows and not sampled:
            self.factors = dict.fromkeys(self._parameters, 1.0)
            return
        ranks = self._attachment.ranks
        samples = {p: self._samples.get(p, _no_samples(p)).nan_to_num(0.0, 0.0, 0.0) for p in sampled}
        age = min(self._attachment.step - self._since, REFRESH)
        told = [age, age**2, *(float(each.square().sum()) for each in samples.values())]
        squares = torch.tensor(told, dtype=torch.float64, device="cpu")
        ranks.average([squares], "squares of sampled gradients")
        ranks.average([*(root for *_, root in rows), *samples.values()], "second moments", codec=INT8)
        # Ranks sum these once more together, as sums on one rank depend on its number of threads.
        sums = [each.square().sum() for each in samples.values()]
        for _, _, before, root in rows:
            sums += [root.new_zeros(()) if before is None else before.sum(), root.square_().sum()]
        totals = torch.stack([each.cpu().double() for each in sums])
        ranks.average([totals], "sums of v")
        left = iter(totals.tolist())
        of_age, of_age_squared, *each_square = squares.tolist()
        # Samples are comparable if they are of the same steps on all ranks: if their ages have no variance.
        alike = of_age_squared - of_age**2 < 0.25 / len(ranks.members) and of_age > _FEWEST - 0.5
        square = dict(zip(samples, each_square, strict=True)) if alike else {}
        of_samples = {p: next(left) for p in samples}
        ratios = {p: self._possible(of_samples[p], total) for p, total in square.items() if total}
        without_v = set(sampled).difference(p for _, p, *_ in rows)
        self.factors.update({p: ratios.get(p, self.factors.get(p, 1.0)) for p in sampled if p in without_v})
        usual = math.fsum(self.factors.values()) / len(self.factors) if self.factors else 1.0
        for moment, p, before, root in rows:
            if self._apart:
                self.factors.setdefault(p, usual)
            of_average, of_own = next(left), next(left)
            if before is None:
                continue
            mean, state = root, self._state(p)  # squared above
            rest = beside(1 - moment.beta2 ** state["step"], mean)
            of_average, of_own = of_average * float(rest), of_own * float(rest)
            if p not in self.factors:
                self.sums[p] = of_own
                self.factors[p] = self._possible(of_average, of_own)
                continue
            if not alone:
                total = of_own
                # Of what the mean contains now, this share was there at the last refresh.
                kept = min(moment.beta2**REFRESH * self.sums.get(p, 0.0) / max(total, 1e-30), 1.0)
                if p in ratios:
                    self.factors[p] += (1 - kept) * (ratios[p] - self.factors[p])
                self.sums[p] = total
            # If a value that is small within its block is rounded to 0 in 8 bits, v stays as it was.
            fresh = torch.where(mean > 0, mean * self.factors[p], before)
            state["exp_avg_sq"].copy_(fresh * rest)

    def _possible(self, averaged: float, own: float) -> float:
        """Return the ratio of the second moment of averaged gradients to that of own ones, within its limits."""
        return min(max(averaged / max(own, 1e-30), 1 / len(self._attachment.ranks.members)), 1.0)

    def clear(self) -> None:
        """Free the memory of moments that are not needed any more."""
        self._of, self._taken, self._samples = {}, {}, {}
        self.factors, self.sums, self._since = {}, {}, self._attachment.step

    def follow(self, numbers: Mapping[torch.Tensor, int]) -> None:
        """Forget parameters that are not in `numbers`."""
        for known in (self._of, self._taken, self._samples, self.factors, self.sums):
            forget_others(known, numbers)

    def join(self) -> None:
        """Replace this rank's own second moments by values that are equal on all ranks, computed from v."""
        self._of, self._taken, self._samples = {}, {}, {}
        self._since = self._attachment.step
        for moment, group in moments_of(self._attachment.optimizer):
            for p in group:
                of = self._state(p)
                if moment.beta2 and "exp_avg_sq" in of:
                    self._of[p] = wide(of["exp_avg_sq"]).clone() / self.factors.get(p, 1.0)
                    self._taken[p] = int(of["step"])

    def observe(self) -> dict[str, Any]:
        """Return the state of this rank alone, for a snapshot. The tensors are no copies and stay in use."""
        every = self._parameters
        return {
            "own": [self._of.get(p) for p in every],
            "taken": [self._taken.get(p, 0) for p in every],
            "samples": [self._samples.get(p) for p in every],
            "since": self._since,
        }

    def restore(self, own: Mapping[str, Any]) -> None:
        """Continue bit for bit from a snapshot. own: the value that `observe` returned."""
        every = self._parameters
        self._of = {p: t.to(p.device) for p, t in zip(every, own["own"], strict=True) if t is not None}
        self._taken = {p: n for p, n in zip(every, own["taken"], strict=True) if n}
        self._samples = {p: t.to(p.device) for p, t in zip(every, own["samples"], strict=True) if t is not None}
        self._since = own["since"]


def _no_samples(parameter: torch.Tensor) -> torch.Tensor:
    """Return zeros for all values that are sampled of this parameter's gradients in REFRESH steps."""
    return wide(parameter).new_zeros(_ROWS, -(-min(parameter.numel(), _SAMPLED) // _ROWS))


def _decayed(
    gradients: list[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    moment: Moment,
    scale: torch.Tensor | None,
    clip: torch.Tensor | float | None,
) -> list[torch.Tensor]:
    """Return the gradients as momentum gets them: without loss scale, clipped, with weight decay."""
    # With a GradScaler, infinite gradients occur, which would make this rank's own v infinite forever.
    if scale is not None:
        gradients = [(g / scale.to(g.device)).nan_to_num_(0.0, 0.0, 0.0) for g in gradients]
    if clip is not None:
        gradients = [g * beside(clip, g) for g in gradients]
    if moment.decay:
        weights = [wide(p) for p in parameters]
        gradients = list(torch._foreach_add(gradients, weights, alpha=moment.sign * moment.decay))
    return gradients
