"""Buffers (BatchNorm statistics): each rank trains with its own; what the script reads is the average."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


class Buffers:
    """Floating buffers that change in training, of the modules of one optimizer.

    The average that came with the last exchange is the official copy, equal on all ranks. `show` puts it into the
    modules (eval(), state_dict()), `hide` puts the rank's own back (train(), the next training forward).
    """

    def __init__(self) -> None:
        self._modules: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()
        self._candidates: list[tuple[weakref.ref[nn.Module], str, torch.Tensor]] = []
        self._official: dict[int, torch.Tensor] = {}
        self._own: weakref.WeakKeyDictionary[nn.Module, list[torch.Tensor]] = weakref.WeakKeyDictionary()

    def watch(self, roots: Iterable[nn.Module], taken: Iterable[nn.Module]) -> None:
        """Find the buffers below the roots: BatchNorm's, and of the others those that `settle` sees change."""
        taken = set(taken)
        for module in {m: None for root in roots for m in root.modules()}:
            if module in taken:
                continue
            names = [n for n, b in module._buffers.items() if b is not None and b.is_floating_point()]
            if names and isinstance(module, _NormBase):
                self._modules[module] = names
            else:
                self._candidates += [(weakref.ref(module), n, module._buffers[n].clone()) for n in names]  # type: ignore[union-attr]

    def settle(self) -> None:
        """After a training forward: keep those that it changed. Constants (masks, position tables) are not sent."""
        for ref, name, before in self._candidates:
            module = ref()
            now = module._buffers.get(name) if module is not None else None
            if module is not None and now is not None and not torch.equal(now, before):
                self._modules.setdefault(module, []).append(name)
        self._candidates = []

    @property
    def modules(self) -> list[nn.Module]:
        return list(self._modules)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The rank's own buffers, in a fixed order; the same tensors as long as the script keeps them."""
        return [b for m, names in self._modules.items() for n in names if (b := m._buffers.get(n)) is not None]

    def update(self, tensors: Sequence[torch.Tensor], averages: Sequence[torch.Tensor]) -> None:
        """A new official copy has come for these tensors."""
        self._official = {id(t): a for t, a in zip(tensors, averages, strict=True)}

    def show(self, module: nn.Module) -> None:
        names = self._modules.get(module)
        if not names or module in self._own or not self._official:
            return
        own = []
        for name in names:
            buffer = module._buffers[name]
            assert buffer is not None
            own.append(buffer.detach().clone())
            if id(buffer) in self._official:
                buffer.data.copy_(self._official[id(buffer)])
        self._own[module] = own

    def hide(self, module: nn.Module) -> None:
        own = self._own.pop(module, None)
        for name, value in zip(self._modules.get(module, ()), own or (), strict=False):
            buffer = module._buffers[name]
            if buffer is not None:
                buffer.data.copy_(value)

    def show_all(self) -> None:
        for module in list(self._modules):
            self.show(module)

    def hide_training(self) -> None:
        """A training forward begins: modules in training mode get the rank's own buffers back."""
        for module in list(self._own):
            if module.training:
                self.hide(module)

    def forget(self, module: nn.Module) -> None:
        """The script has loaded values: they are official and the rank's own."""
        self._own.pop(module, None)
        for name in self._modules.get(module, ()):
            buffer = module._buffers[name]
            if buffer is not None:
                self._official.pop(id(buffer), None)
