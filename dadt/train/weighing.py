"""Computes the weight of each rank's gradient in the mean over ranks: from the denominators of its losses, or from its
number of samples."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import isclose, isnan, log2, nan
from typing import Any, Protocol
from zlib import crc32

import torch

from dadt.train import denominator
from dadt.train.algorithm import Algorithm
from dadt.train.batch_weight import BatchWeight
from dadt.train.denominator import Denominator
from dadt.train.exchange.step_metadata import StepMetadata
from dadt.train.optimizers import Optimizers
from dadt.train.restored import Trained

_LAST, _GIVEN = 1, 2
_MOST = 1 << 12
"""Maximum number of backwards of a step whose denominators are stored, as some optimizers never step."""
_MEAN = "one mean of cross_entropy, nll_loss or binary_cross_entropy_with_logits"


class Weighed(Trained, Protocol):
    """Interface of an optimizer that DADT manages, with the members that `Weighing` uses."""

    step: int
    algorithm: Algorithm
    batch_weight: BatchWeight
    optimizers: Optimizers


class Rule(Enum):
    """Rule by which ranks' gradients are weighed in the mean, the same on all ranks."""

    OPEN = "it is not known yet whether denominators are in proportion to samples"
    SAMPLES = "denominators have been in proportion to samples, or are not known"
    STEPS = "a rank has one weight in each step: the denominator of its loss"
    BACKWARDS = "each backward of a step has a weight of its own"


@dataclass(frozen=True, slots=True)
class Counted:
    """Report of one rank to all others about one backward pass."""

    fill: float = 0.0
    """Weight of the rank's gradient in this backward by its number of samples; 0 if no sample counts."""
    over: float = nan
    """Number by which the loss divides its sum over targets; NaN if it is not known."""
    is_last: bool = True
    is_given: bool = False
    """Whether the script itself has divided the loss, by a number of its own."""

    def pack(self) -> bytes:
        return _FORMAT.pack(self.fill, self.over, self.is_last * _LAST | self.is_given * _GIVEN)

    @classmethod
    def unpack(cls, data: bytes) -> Counted:
        fill, over, bits = _FORMAT.unpack(data)
        return cls(fill, over, bool(bits & _LAST), bool(bits & _GIVEN))


_FORMAT = struct.Struct("<ddB")


class Weighing:
    """Computes the weight of one optimizer's gradient on this rank.

    The gradient of a mean over D targets is the gradient of the sum divided by D (the denominator). So the weighted
    mean over ranks equals the mean over all ranks' targets if each rank has the weight D. If several backwards add up
    to a step, each has its own D, which ranks report to each other before the backward runs. In all other steps D is
    sent with the exchange. As long as D is proportional to the number of samples on all ranks, ranks are weighed by
    samples, which gives the same bits as without denominators.
    """

    def __init__(self, attachment: Weighed) -> None:
        self._attachment, self._config = attachment, attachment.ranks.config
        self._rule = Rule.OPEN
        self._unit = 1.0
        """Denominator that corresponds to the weight 1. It is a power of two, so that dividing by it rounds no
        value."""
        self._usual = 1.0
        """Last known ratio of this rank's weight by denominators to its weight by samples."""
        self._found: list[Denominator | None] = []
        """Denominators of the backwards since the last exchange."""
        self._told: list[list[Counted]] = []
        """All ranks' reports about each backward since the last exchange; empty if ranks do not report backwards."""
        self._scaled = False
        """Whether a backward since the last exchange has been multiplied by its weight."""
        self._wanted: bool | None = False if self._config.weigh == "samples" else None
        self._is_on = False
        """Whether the denominators of this step's losses are read."""
        self._has_looked = False
        """Whether DADT has already checked whether to inform the user that a denominator is not known."""
        self.launches_early = True
        """Whether parts of the gradient may be sent during a backward. They may not while ranks report each backward to
        each other, since a later backward may add to the gradient."""
        self.density = nan
        """Denominator of the coming exchange's gradient divided by the rank's weight by samples, which all ranks
        compare. If losses with different denominators add up, it is a negative number computed from all of them. NaN if
        any denominator is not known."""

    def _is_wanted(self) -> bool:
        """Whether denominators are read. They are not by default in a script that averages gradients or divides data
        itself, because it may already take them into account."""
        a = self._attachment
        if self._wanted is None:
            script, asked = a.optimizers.script, self._config.weigh
            by_itself = script.explicit or script.is_distributed or a.ranks.world.island_size > 0
            self._wanted = asked == "tokens" or (asked == "auto" and not by_itself)
        return self._wanted and a.ranks.together and a.algorithm.averages

    @property
    def _is_exact(self) -> bool:
        """Whether ranks can report each backward to each other. They cannot if exchanges are in flight between steps or
        ranks may be lost, because a report would wait for the exchange or for the lost rank."""
        return self._attachment.algorithm.in_flight == 0 and not self._config.min_np

    def _tells(self) -> bool:
        """Whether ranks report the denominator of each backward to each other."""
        return self._rule in (Rule.OPEN, Rule.BACKWARDS) and self._is_exact and self._attachment.optimizers.trains_one

    # Backwards -------------------------------------------------------------------------------------------------

    def backward_begins(self, losses: torch.Tensor | Sequence[torch.Tensor]) -> float:
        """Read the denominator of a backward of these losses, which is about to begin. Returns the factor by which its
        gradients have to be multiplied."""
        if self._found and not self._told and all(p.grad is None for p in self._attachment.parameters):
            self._found = []  # the script has discarded the gradients of earlier backwards
        if not self._found:
            self._begin_step()
        if not self._is_on:
            return 1.0
        found = denominator.of(losses)
        self._found = [*self._found[-_MOST:], found]
        if found is None and not self._has_looked:
            self._say_unknown(losses)
        if self.launches_early or (self._rule is Rule.OPEN and len(self._found) == 1):
            return 1.0  # most steps have no other backward, so no report is needed
        if len(self._found) > len(self._told) + 1:
            self._scale(self._tell(self._counted(0)))
        return self._tell(self._counted(len(self._found) - 1))

    def _begin_step(self) -> None:
        self._is_on = self._is_wanted()
        self.launches_early = not (self._is_on and self._tells())

    def _counted(self, index: int, *, is_last: bool = False) -> Counted:
        found = self._found[index]
        over = found.read() if found is not None else None
        given = found is not None and found.is_given
        return Counted(self._attachment.batch_weight.fill(index), nan if over is None else over, is_last, given)

    def _tell(self, mine: Counted) -> float:
        """Report a backward to all ranks, and wait for their reports. Returns the factor of this rank's gradient, which
        is the number of ranks times this rank's share of all denominators; 1 if the shares are not known or equal those
        by samples."""
        a = self._attachment
        gathering = a.ranks.allgather(f"denominator {len(self._told)} of step {a.step}{a.name}", mine.pack())
        a.ranks.wait(gathering)
        every = [Counted.unpack(lane) for lane in gathering.lanes]
        self._told.append(every)
        counting = [each for each in every if each.fill]
        total = sum(each.over for each in counting)
        open_yet = self._rule is Rule.OPEN and not self._scaled
        if not total or isnan(total) or (open_yet and _equal([each.over / each.fill for each in counting])):
            return 1.0
        self._scaled = True
        return mine.over * len(every) / total if mine.fill else 0.0

    def _scale(self, factor: float) -> None:
        with torch.no_grad():
            for p in self._attachment.parameters if factor != 1 else ():
                if p.grad is not None:
                    p.grad.mul_(factor)

    def settle(self, *, again: bool = False) -> float:
        """Return the weight of this rank's gradient in the coming exchange. Called when no further backward adds to the
        gradient. Ranks that report each backward continue to report until all ranks have reported their last one.
        again: whether the same gradient was exchanged before."""
        by_samples = self._attachment.batch_weight.value
        if self._wanted is not False and not self._found:
            self._begin_step()  # no backward was seen on this rank, but other ranks may have had one
        if not self._is_on:
            return by_samples
        if not again and not self.launches_early:
            self._settle()
        over = None if self._told or not by_samples else self._over()
        self.density = nan if over is None else self._density(over, by_samples)
        if self._scaled:
            return 1.0
        if self._rule in (Rule.OPEN, Rule.SAMPLES):
            return by_samples
        if over is None:
            return by_samples * self._usual
        self._usual = over / self._unit / by_samples or self._usual
        return over / self._unit

    def _settle(self) -> None:
        untold = self._rule is Rule.OPEN and len(self._found) == 1
        while not _are_last(self._told):
            factor = self._tell(self._counted(0, is_last=True) if untold else Counted())
            if untold and not _are_last(self._told):
                self._scale(factor)
            untold = False
        if self._rule is Rule.OPEN and len(self._told) > 1:
            self._judge_backwards()
        elif self._rule is Rule.OPEN:
            self._judge([(each.fill, each.over) for each in self._told.pop()])
            self._scaled = False

    # The exchange ----------------------------------------------------------------------------------------------

    def _over(self) -> float | None:
        """Return the denominator of this step's gradient; None if it is not known. If losses with different
        denominators add up, it is their sum."""
        if len(self._found) == 1:
            return None if self._found[0] is None else self._found[0].read()
        read = [None if found is None else found.read() for found in self._found]
        known = [each for each in read if each is not None]
        if not known or len(known) < len(read):
            return None
        given = all(found is not None and found.is_given for found in self._found)
        return known[0] if given and max(known) == min(known) else sum(known)

    def _density(self, over: float, by_samples: float) -> float:
        if len(self._found) == 1 or not self._is_exact:
            return over / by_samples
        each = [self._counted(i) for i in range(len(self._found))]
        if all(c.is_given and c.over == over for c in each):
            return over / by_samples
        # used for backwards in which no sample of this rank counts
        some = next(c.over / c.fill for c in each if c.fill)
        return -1.0 - crc32(b"".join(struct.pack("<d", c.over / c.fill if c.fill else some) for c in each))

    def agree(self, lanes: Sequence[StepMetadata]) -> bool:
        """Compare all ranks' densities (denominators divided by weights by samples), and choose the rule for later
        steps, which is the same on all ranks. Returns whether the ranks' weights were wrong, so that a synchronous step
        has to exchange again."""
        if not self._is_on or self._told or self._rule is Rule.BACKWARDS:
            return False
        before, first = self._rule, lanes[0].density
        for lane in lanes:
            if lane.density != first or before is Rule.OPEN:
                break
        else:
            return False
        densities = [lane.density for lane in lanes if lane.weight > 0]
        if any(map(isnan, densities)):
            self._rule = Rule.SAMPLES if before is Rule.OPEN else before
        elif any(d < 0 for d in densities):
            if len(set(densities)) > 1:
                self._begin(Rule.BACKWARDS, max(1.0, *densities))
        elif before in (Rule.OPEN, Rule.SAMPLES):
            self._judge([(1.0, density) for density in densities])
        return before is not self._rule and self._rule is Rule.STEPS

    def exchanged(self) -> None:
        """Forget the batches and backwards of an exchange that has begun; later ones belong to the next exchange."""
        self._attachment.batch_weight.exchanged()
        self._found, self._told, self._scaled, self.density = [], [], False, nan

    # The rule --------------------------------------------------------------------------------------------------

    def _judge(self, every: Sequence[tuple[float, float]]) -> None:
        """Choose a rule. every: for each rank, the weight by samples and the denominator of its step."""
        self._rule = Rule.SAMPLES
        densities = [over / fill for fill, over in every if fill]
        if densities and not any(map(isnan, densities)):
            if not _equal(densities):
                self._begin(Rule.STEPS, sum(densities) / len(densities))
            elif self._config.weigh == "tokens":
                self._say("are in proportion to its samples so far, and these are its weight")

    def _judge_backwards(self) -> None:
        """Choose a rule from all ranks' reports about the backwards of the first step."""
        backwards = [[each for each in every if each.fill] for every in self._told]
        each = [c for every in backwards for c in every]
        if not each or any(isnan(c.over) for c in each):
            self._rule = Rule.SAMPLES
        elif all(
            c.is_given and c.over == of_rank[0].over
            for of_rank in zip(*self._told, strict=True)
            for c in of_rank
            if c.fill
        ):
            self._judge([(c.fill, c.over) for c in backwards[0]])
        elif all(_equal([c.over / c.fill for c in every]) for every in backwards):
            self._rule = Rule.SAMPLES
        else:
            self._begin(Rule.BACKWARDS, sum(c.over for c in each) / len(each))

    def _begin(self, rule: Rule, usual: float) -> None:
        """Weigh ranks by denominators from now on. usual: a typical denominator, which gets about the weight 1."""
        self._rule, self._unit = rule, 2.0 ** round(log2(usual)) if usual > 0 else 1.0
        more = ", in each backward of a step" if rule is Rule.BACKWARDS else ""
        self._say(f"are not in proportion to its samples: they are its weight{more}")

    def _say(self, text: str) -> None:
        a = self._attachment
        a.ranks.say(f"--weigh {self._config.weigh}: the targets (tokens) that count in a rank's loss{a.name} {text}")

    def _say_unknown(self, losses: torch.Tensor | Sequence[torch.Tensor]) -> None:
        a, self._has_looked = self._attachment, True
        if self._config.weigh == "tokens" or denominator.has_entropy(losses):
            a.ranks.say(
                f"--weigh {self._config.weigh}: a loss{a.name} is not {_MEAN}, as far as its graph tells: its ranks are"
                " weighed by samples"
            )

    # Checkpoints and snapshots ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what all ranks have in common, for a checkpoint."""
        return {"rule": self._rule.name, "unit": self._unit}

    def load_state(self, state: dict[str, Any]) -> None:
        if state:
            self.restore({**state, "usual": 1.0})

    def observe(self) -> dict[str, Any]:
        return {"rule": self._rule.name, "unit": self._unit, "usual": self._usual}

    def restore(self, state: dict[str, Any]) -> None:
        self._rule, self._unit, self._usual = Rule[state["rule"]], state["unit"], state["usual"]


def _equal(numbers: Sequence[float]) -> bool:
    return all(isclose(each, numbers[0], rel_tol=1e-9) for each in numbers)


def _are_last(told: Sequence[Sequence[Counted]]) -> bool:
    """Whether all ranks have reported their last backward."""
    return bool(told) and all(each.is_last for each in told[-1])
