"""The parameters that an optimizer trains, and the modules that have them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter

import torch
from torch import nn

_requires_grad, _params = attrgetter("requires_grad"), itemgetter("params")


def listed(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer's parameters, each once: where tied weights are given twice, torch only warns."""
    return list({id(p): p for g in optimizer.param_groups for p in g["params"]}.values())


class ParameterListing:
    """An optimizer's parameters, listed again only where the script has changed them: looks are many in each step, and
    a comparison costs a fraction of a list."""

    def __init__(self) -> None:
        self._given: list[torch.Tensor] = []
        self._every: list[torch.Tensor] = []
        self._wants: list[bool] = []
        self._trained: list[torch.Tensor] = []
        self.used: frozenset[int] = frozenset()
        """Frozen parameters, by id, whose gradients this step uses all the same, where there are any."""
        self._idle: frozenset[int] = frozenset()

    def every(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """All parameters, each once; the same list object for as long as they stay the same."""
        given = list(chain.from_iterable(map(_params, optimizer.param_groups)))
        if len(given) != len(self._given) or not all(map(is_, given, self._given)):
            self._given, self._every, self._wants = given, listed(optimizer), []
        return self._every

    def trained(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """The parameters that are not frozen, or in `used`; the same list object for as long as they stay the same."""
        before, every = self._every, self.every(optimizer)
        wants = list(map(_requires_grad, every))
        if every is not before or wants != self._wants:
            self._wants = wants
            self._trained = [p for p, wanted in zip(every, wants, strict=True) if wanted or id(p) in self.used]
        return self._trained

    def use_frozen(self, optimizer: torch.optim.Optimizer, before: Sequence[torch.Tensor]) -> None:
        """Have this step train frozen ones that have a gradient, which an optimizer applies, and those of `before`, of
        the last step, that may have one on other ranks: the script may have frozen them behind a backward."""
        if len(self.trained(optimizer)) == len(self._every):
            return
        left = {id(p) for p in before} - self._idle
        frozen = (p for p in self._every if not p.requires_grad)
        self._use(frozenset(id(p) for p in frozen if p.grad is not None or id(p) in left))

    def averaged(self, frozen: frozenset[int], averages: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """An exchange that used these frozen ones, by id, has come: those without an average are not used again."""
        self._idle = frozen and frozen.difference(id(p) for p, _ in averages)

    def let_go(self) -> None:
        """The step is over: none of its frozen parameters are used any more."""
        if self.used:
            self._use(frozenset())

    def _use(self, used: frozenset[int]) -> None:
        if used != self.used:
            self.used, self._wants = used, []


def below(roots: list[nn.Module]) -> list[weakref.ref[nn.Module]]:
    return [weakref.ref(m) for m in dict.fromkeys(m for root in roots for m in root.modules())]


def sparse_tables(modules: list[nn.Module], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    ids = {id(p) for p in parameters}
    tables = [m.weight for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
    return [table for table in tables if id(table) in ids]
