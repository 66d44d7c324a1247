"""Notices gradients that grow: by a hook on each parameter, where somebody wants to know."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_gradient = attrgetter("grad")


class Growth:
    """Watches one optimizer's gradients. Each one that grows costs a call, so there are no hooks until `watch`."""

    def __init__(self) -> None:
        self.seen = False
        """A gradient has grown since averages came."""
        self._averages: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.told: Callable[[torch.Tensor], None] | None = None
        """Called with each parameter whose gradient has grown."""
        self.watches = False
        self._hooked = WeakTensorKeyDictionary()
        self._hooks: list[Any] = []
        # Of a script that builds its optimizer again in each epoch, each would leave one on each parameter.
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def delivered(self, parameters: Sequence[torch.Tensor]) -> None:
        """`.grad` holds the averages of this step: growth is noticed from here on."""
        self.seen = False
        self._averages = list(zip(parameters, map(_gradient, parameters), strict=True))

    def forget(self) -> None:
        """The step is over: let go of its averages."""
        self._averages = []

    @property
    def has_averages(self) -> bool:
        """Whether the script still has any of those that came in this step."""
        return any(p.grad is average for p, average in self._averages if average is not None)

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        self.watches = True
        this = weakref.ref(self)

        def grew(parameter: torch.Tensor) -> None:
            if (growth := this()) is not None:
                growth.seen = True
                if growth.told is not None:
                    growth.told(parameter)

        for p in parameters:
            if p not in self._hooked and p.is_leaf:
                wanted = p.requires_grad  # not where it is frozen behind its backward
                hook = p.requires_grad_().register_post_accumulate_grad_hook(grew)  # type: ignore[no-untyped-call]
                p.requires_grad_(wanted)
                self._hooks.append(hook)
                self._hooked[p] = True


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()
