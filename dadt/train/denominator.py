"""Finds the number by which a loss divides its sum over targets, by reading the loss's autograd graph. For a mean cross
entropy this is the number of targets, or the sum of their class weights. For a sum that the script divides, it is the
script's divisor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isclose, isnan
from typing import Any

import torch

from dadt.train.later import Later

_DEEPEST, _MOST_LOOKED_AT = 64, 200
"""Largest depth of the graph, and largest number of its nodes, that are examined."""
_MEAN, _SUM = 1, 2
_OF_CLASSES = ("NllLossBackward0", "NllLoss2DBackward0")
_OF_LOGITS = "BinaryCrossEntropyWithLogitsBackward0"
_ENTROPIES = (*_OF_CLASSES, _OF_LOGITS, "LogSoftmaxBackward0", "CompiledFunctionBackward")
_FACTORS = ("MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1")
_SUMS = ("AddBackward0", "SubBackward0")
_SAME = (
    *("ToCopyBackward0", "CloneBackward0", "AliasBackward0", "ViewBackward0", "NegBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0"),
)
"""Names of autograd nodes that return the loss below them unchanged, or negated."""
_SELECTED = frozenset(
    [
        *(*_SAME, "MulBackward0", "MulBackward1", "MaskedFillBackward0", "MaskedFillBackward1", "WhereBackward0"),
        *("IndexBackward0", "MaskedSelectBackward0", "SliceBackward0", "SelectBackward0", "TransposeBackward0"),
    ]
)
"""Names of autograd nodes whose result consists of elements of their input, each times a constant."""
_PASSED = frozenset((*_FACTORS, *_SUMS, *_SAME, "MeanBackward0"))


@dataclass(frozen=True, slots=True)
class Denominator:
    """The number by which a loss divides the sum over its targets."""

    parts: Sequence[Later]
    """The denominator of each term of the loss. If they differ, the loss has no common denominator."""
    least: Sequence[Later] = ()
    """For each sum that the script has divided, the sum of the weights of its targets, if known. The denominator cannot
    be less."""
    is_given: bool = False
    """Whether the script has divided by a number of its own, which may count all targets of several losses."""

    def read(self) -> float | None:
        """Return the denominator; None if the terms have different ones, or if it is less than the weight of this
        loss's targets."""
        first = self.parts[0].read()
        for other in self.parts[1:]:
            if not isclose(first, other.read(), rel_tol=1e-6):
                return None
        for least in self.least:
            if first < least.read() * (1 - 1e-6):
                return None
        return None if isnan(first) else first


@dataclass(frozen=True, slots=True)
class _Term:
    """One term of a loss. over: number by which it is divided; None for a sum. counts: whether it is a cross entropy.
    least: sum of the weights of its targets. is_given: whether the script has divided it by a number."""

    over: Any
    counts: bool
    least: Any = None
    is_given: bool = False


def of(tensors: torch.Tensor | Sequence[torch.Tensor]) -> Denominator | None:
    """Return the denominator of a backward's losses. The losses must be constants times the mean of a cross entropy: by
    `cross_entropy`, `nll_loss` or `binary_cross_entropy_with_logits`, or of log-probabilities that the script selects.
    Further terms of the same denominator, such as label smoothing, are allowed. Returns None for any other loss."""
    terms: list[_Term] = []
    for node in _roots(tensors):
        found = _terms(node, 0)
        if found is None:
            return None
        terms += found
    if not any(term.counts for term in terms) or any(term.over is None for term in terms):
        return None
    least = [_later(term.least) for term in terms if term.least is not None]
    return Denominator([_later(term.over) for term in terms], least, any(term.is_given for term in terms))


def has_entropy(tensors: torch.Tensor | Sequence[torch.Tensor]) -> bool:
    """Whether the graph of the losses has a cross entropy near its end, or is compiled, so that it may have one."""
    nodes, seen = _roots(tensors), 0
    while nodes and seen < _MOST_LOOKED_AT:
        node = nodes.pop(0)
        seen += 1
        if node.name() in _ENTROPIES:
            return True
        nodes += [each for each, _ in node.next_functions if each is not None]
    return False


def _roots(tensors: torch.Tensor | Iterable[torch.Tensor]) -> list[Any]:
    every = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return [t.grad_fn for t in every if isinstance(t, torch.Tensor) and t.grad_fn is not None]


def _terms(node: Any, depth: int) -> list[_Term] | None:
    """Return the terms that this node of the graph adds up; None if one of them is neither a mean nor a cross
    entropy."""
    name = node.name()
    if name in _OF_CLASSES or name == _OF_LOGITS:
        return _of_entropy(node, name)
    if depth > _DEEPEST or name not in _PASSED:
        return None
    below = [each for each, _ in node.next_functions]
    if name in _SUMS:
        branches = [_terms(each, depth + 1) for each in below if each is not None]
        return None if None in branches else [term for branch in branches if branch for term in branch]
    if name == "MeanBackward0":
        count = float(node._saved_self_sym_numel)
        return _terms(below[0], depth + 1) if count == 1 else [_Term(count, _are_entropies(below[0]))]
    if name in _SAME:
        return _terms(below[0], depth + 1)
    if name in _FACTORS and sum(each is not None for each in below) == 1:
        if name.startswith("Mul"):
            return _terms(next(each for each in below if each is not None), depth + 1)
        return None if below[0] is None else _quotient(node, below[0], depth)
    return None


def _quotient(node: Any, of_what: Any, depth: int) -> list[_Term] | None:
    """Return the terms of a value divided by a constant. If the value is a sum, the constant is its denominator."""
    over = node._saved_other
    if isinstance(over, torch.Tensor) and over.numel() != 1:
        return None
    while of_what.name() in _SAME:
        of_what = of_what.next_functions[0][0]
    if of_what.name() == "SumBackward0":
        return [_Term(over, _are_entropies(of_what.next_functions[0][0]), is_given=True)]
    terms = _terms(of_what, depth + 1)
    return terms and [_Term(over, t.counts, t.least, is_given=True) if t.over is None else t for t in terms]


def _are_entropies(node: Any) -> bool:
    """Whether each element of a tensor is the cross entropy of a single target times a constant, or zero."""
    for _ in range(_DEEPEST):
        name = node.name()
        if name in _OF_CLASSES or name == _OF_LOGITS or "LogProb" in name:
            return True
        below = [each for each, _ in node.next_functions if each is not None]
        if name == "GatherBackward0":
            return bool(below[0].name() == "LogSoftmaxBackward0")
        if len(below) != 1 or name not in _SELECTED:
            return False
        node = below[0]
    return False


def _of_entropy(node: Any, name: str) -> list[_Term] | None:
    if node._saved_reduction not in (_MEAN, _SUM):
        return None
    try:
        total = float(node._saved_self.numel()) if name == _OF_LOGITS else node._saved_total_weight
    except RuntimeError:  # an earlier backward has freed the graph's tensors, and this one will raise an error for that
        return None
    return [_Term(total, counts=True) if node._saved_reduction == _MEAN else _Term(None, counts=True, least=total)]


def _later(number: Any) -> Later:
    value = (
        number if isinstance(number, torch.Tensor) else torch.tensor(float(number), dtype=torch.float64, device="cpu")
    )
    return Later(value.detach())
