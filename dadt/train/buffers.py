"""Averaged buffers such as BatchNorm statistics: each rank trains with its own values, and the script reads the
average."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from dadt.train.exchange.step_metadata import any_flags, pack_flags
from dadt.train.ranks import Ranks


def buffer_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the module's buffer of this name, or None if the module does not have it any more."""
    buffers = module._buffers
    return buffers[name] if name in buffers else None  # noqa: SIM401 (a scripted module's have no get)


Observed = tuple[nn.Module, list[str], dict[str, torch.Tensor], dict[str, torch.Tensor] | None]


class Buffers:
    """The floating-point buffers that training changes, in all trained modules. One instance per runtime.

    The average that came with the last exchange is the official copy, equal on all ranks. `show` writes it into a
    module (for eval() or state_dict()); `hide` restores the rank's own values (for train() or the next training
    forward).
    """

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()
        self.added = 0
        """Number of modules added so far."""
        self._official: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.Tensor]] = weakref.WeakKeyDictionary()
        self._own: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.Tensor]] = weakref.WeakKeyDictionary()

    def watch(self, modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """Add BatchNorm's statistics of these modules. Returns (module, name, copy of its value) for all other
        floating-point buffers. The caller passes those that training changes to `add`, since constants (masks, position
        tables) need not be sent.
        """
        candidates = []
        for module in modules:
            names = [n for n, b in module._buffers.items() if b is not None and b.is_floating_point()]
            if isinstance(module, _NormBase):
                self._take_up(module, names)
            else:
                candidates += [(module, n, b.detach().clone()) for n in names if (b := module._buffers[n]) is not None]
        return candidates

    def __contains__(self, module: nn.Module | None) -> bool:
        return module in self._names

    def _take_up(self, module: nn.Module, names: list[str]) -> list[str]:
        self.added += module not in self._names
        return self._names.setdefault(module, names)

    def add(self, module: nn.Module, name: str) -> None:
        names = self._take_up(module, [])
        if name not in names:
            names.append(name)

    def of(self, modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """Return (module, buffer name, the rank's own buffer) for each averaged buffer, in the order of the modules."""
        return [(m, n, b) for m in modules for n in self._names.get(m, ()) if (b := buffer_of(m, n)) is not None]

    def update(self, places: Sequence[tuple[nn.Module, str]], averages: Sequence[torch.Tensor]) -> None:
        """Store newly averaged values as the official copies, which the script reads. places: (module, buffer name) of
        each average."""
        for (module, name), average in zip(places, averages, strict=True):
            self._official.setdefault(module, {})[name] = average

    def show(self, module: nn.Module) -> None:
        official = self._official.get(module)
        if not official or module in self._own:
            return
        own = {}
        for name, average in official.items():
            buffer = buffer_of(module, name)
            if buffer is not None and buffer.shape == average.shape:
                own[name] = buffer.detach().clone()
                buffer.data.copy_(average)
        self._own[module] = own

    def hide(self, module: nn.Module) -> None:
        for name, value in self._own.pop(module, {}).items():
            buffer = buffer_of(module, name)
            if buffer is not None and buffer.shape == value.shape:
                buffer.data.copy_(value)

    def observe(self) -> list[Observed]:
        """Return, for each module, the names of its averaged buffers, their official copies (the averages), and this
        rank's own values if the module contains the averages at the moment, otherwise None."""
        return [(m, list(names), dict(self._official.get(m, {})), self._own.get(m)) for m, names in self._names.items()]

    def restore(self, every: Iterable[Observed]) -> None:
        """Restore the averages of the buffers from a snapshot. The modules' buffers must already contain the values
        that they had when the snapshot was taken."""
        for table in (self._names, self._official, self._own):
            table.clear()
        for module, names, official, own in every:
            self._take_up(module, list(names))
            if official:
                self._official[module] = official
            if own is not None:
                self._own[module] = own

    def release(self) -> None:
        """Write the averages (official copies) into the modules, and forget which buffers are averaged."""
        self.show_all()
        for table in (self._names, self._official, self._own):
            table.clear()

    def show_all(self) -> None:
        for module in list(self._names):
            self.show(module)

    def hide_training(self) -> None:
        """Restore the rank's own buffers in modules that are in training mode. Called when a training forward
        begins."""
        for module in list(self._own):
            if module.training:
                self.hide(module)

    def keep_shown(self, modules: Iterable[nn.Module]) -> None:
        """Make the current buffers of these modules the rank's own, because training has continued with the averaged
        buffers."""
        for module in modules:
            if module.training:
                self._own.pop(module, None)

    def join(self, module: nn.Module, name: str, value: torch.Tensor) -> None:
        """Replace the rank's own value of a buffer by `value`, which is equal on all ranks. The averaged value that the
        script reads does not change."""
        self.add(module, name)
        shown, buffer = self._own.get(module, {}), buffer_of(module, name)
        if name in shown:
            shown[name] = value.to(shown[name].device, copy=True)
        elif buffer is not None:
            self._official.setdefault(module, {}).setdefault(name, buffer.detach().clone())
            buffer.data.copy_(value)

    def join_official(self, modules: Iterable[nn.Module]) -> None:
        """Replace the rank's own buffers of these modules by the official copies, which are the averages that the
        script reads."""
        for module in modules:
            for name, average in self._official.get(module, {}).items():
                self.join(module, name, average)

    def forget(self, module: nn.Module) -> None:
        """Forget the averages and the rank's own values of a module whose buffers the script has set, since the new
        values replace both."""
        self._own.pop(module, None)
        self._official.pop(module, None)


class ChangingBuffers:
    """The buffers of one optimizer's modules that are averaged. A buffer is averaged once a training forward has
    changed it on any rank."""

    def __init__(self, buffers: Buffers, ranks: Ranks, name: str) -> None:
        """name: suffix that names the optimizer in names of operations; empty for the first optimizer."""
        self._buffers = buffers
        self._ranks = ranks
        self._name = name
        self._candidates: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._found_in: tuple[object, int] = (None, 0)
        self._found: list[weakref.ref[nn.Module]] = []
        """Weak references to the modules that have buffers to average, which most modules do not have."""

    def of(self, modules: list[weakref.ref[nn.Module]]) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """Return (module, buffer name, the rank's own buffer) for each averaged buffer, in the order of the modules."""
        if self._found_in != (found_in := (modules, self._buffers.added)):
            self._found_in, self._found = found_in, [ref for ref in modules if ref() in self._buffers]
        return self._buffers.of(m for ref in self._found if (m := ref()) is not None)

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Store copies of the buffers of these modules, by which `select` finds out which buffers training changes."""
        self._candidates += self._buffers.watch(modules)

    def forget(self) -> None:
        """Drop the copies that `watch` has made, because it is already known which buffers are averaged."""
        self._candidates = []

    def select(self) -> None:
        """Begin to average each buffer that has changed on any rank since `watch` copied it. Called after a training
        forward, on all ranks together."""
        if not self._candidates:
            return
        pairs = [(buffer_of(m, n), before) for m, n, before in self._candidates]
        changed = [now is not None and not torch.equal(now, before) for now, before in pairs]
        # A buffer that changed its shape is not averaged, because it is not a statistic of training, but for example a
        # table of positions that grows with the longest text.
        reshaped = [now is None or now.shape != before.shape for now, before in pairs]
        work = self._ranks.allgather(f"buffers that change{self._name}", pack_flags(changed + reshaped))
        self._ranks.wait(work)
        flags = any_flags(work.lanes, 2 * len(pairs))
        for (m, n, _), change, reshape in zip(self._candidates, flags[: len(pairs)], flags[len(pairs) :], strict=True):
            if change and not reshape:
                self._buffers.add(m, n)
        self._candidates = []
