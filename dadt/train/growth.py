"""Detects, by a hook on each parameter, gradients that grow, which means that a backward adds to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_gradient = attrgetter("grad")


class Growth:
    """Detects when a backward adds to one optimizer's gradients. Each time costs a Python call, so the hooks are
    installed only when `watch` is called."""

    def __init__(self) -> None:
        self.seen = False
        """Whether a backward has added to any gradient since this step's averages arrived."""
        self._averages: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.told: Callable[[torch.Tensor], None] | None = None
        """Callback for each parameter to whose gradient a backward has added, or None."""
        self.watches = False
        self._hooked = WeakTensorKeyDictionary()
        self._hooks: list[Any] = []
        # Hooks are removed with this object, because a script that builds a new optimizer in each epoch would otherwise
        # add another hook to every parameter each time.
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def delivered(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note which gradients are this step's averages, so that a backward that adds to any of them is noticed from
        now on."""
        self.seen = False
        self._averages = list(zip(parameters, map(_gradient, parameters), strict=True))

    def forget(self) -> None:
        """Drop the references to the step's averaged gradients. Called when the step is over."""
        self._averages = []

    @property
    def has_averages(self) -> bool:
        """Whether any `.grad` is still an average that arrived in this step."""
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
                # A hook can only be registered while the parameter requires gradients. The parameter may be frozen, so
                # its old setting is restored below.
                wanted = p.requires_grad
                hook = p.requires_grad_().register_post_accumulate_grad_hook(grew)  # type: ignore[no-untyped-call]
                p.requires_grad_(wanted)
                self._hooks.append(hook)
                self._hooked[p] = True


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()
