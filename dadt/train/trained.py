"""Lists the parameters that an optimizer trains, and the modules that contain them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

_requires_grad, _params = attrgetter("requires_grad"), itemgetter("params")


def listed(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return each of the optimizer's parameters once, since torch accepts tied weights that are listed twice with only
    a warning."""
    return list({id(p): p for g in optimizer.param_groups for p in g["params"]}.values())


class ParameterListing:
    """Cached lists of an optimizer's parameters, which are rebuilt only if the script has changed them, because each
    step needs the lists often, and comparing is much cheaper than listing."""

    def __init__(self) -> None:
        self._given: list[torch.Tensor] = []
        self._every: list[torch.Tensor] = []
        self._wants: list[bool] = []
        self._trained: list[torch.Tensor] = []
        self.used: frozenset[int] = frozenset()
        """Ids of frozen parameters whose gradients this step still uses."""
        self._idle: frozenset[int] = frozenset()
        self.ever = WeakTensorKeyDictionary()
        """The parameters that have been trained at any time, also those that are frozen now."""

    def every(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Return all parameters, each once, as the same list object while they do not change."""
        given = list(chain.from_iterable(map(_params, optimizer.param_groups)))
        if len(given) != len(self._given) or not all(map(is_, given, self._given)):
            self._given, self._every, self._wants = given, listed(optimizer), []
        return self._every

    def trained(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Return the parameters that are not frozen or are in `used`, as the same list object while they do not
        change."""
        before, every = self._every, self.every(optimizer)
        wants = list(map(_requires_grad, every))
        if every is not before or wants != self._wants:
            self._wants = wants
            self._trained = [p for p, wanted in zip(every, wants, strict=True) if wanted or id(p) in self.used]
            self.ever.update(dict.fromkeys(self._trained, True))
        return self._trained

    def use_frozen(self, optimizer: torch.optim.Optimizer, before: Sequence[torch.Tensor]) -> None:
        """Let this step use frozen parameters that have a gradient, which the optimizer would apply, since the script
        may have frozen them after the backward. before: the last step's parameters; those of them that are frozen now
        are used, too, as they may have a gradient on other ranks.
        """
        if len(self.trained(optimizer)) == len(self._every):
            return
        left = {id(p) for p in before} - self._idle
        frozen = (p for p in self._every if not p.requires_grad)
        self._use(frozenset(id(p) for p in frozen if p.grad is not None or id(p) in left))

    def averaged(self, frozen: frozenset[int], averages: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Note which frozen parameters got no average in an exchange that has arrived, so that they are not used again.
        frozen: ids of the exchange's frozen parameters."""
        self._idle = frozen and frozen.difference(id(p) for p, _ in averages)

    def let_go(self) -> None:
        """Stop using frozen parameters, because the step is over."""
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
