"""Records the optimizers of a script, with their order, which of them train data-parallel, and which modules they
train."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dadt.errors import ConfigError
from dadt.train import built
from dadt.train.algorithm import Algorithm
from dadt.train.buffers import Buffers
from dadt.train.one_batch import OneBatch
from dadt.train.ranks import Ranks
from dadt.train.replay_state import ReplayState
from dadt.train.script import Script
from dadt.train.stand_in import name_of

_LENGTHS = ("T_max", "total_steps")
"""Attributes in which CosineAnnealingLR and OneCycleLR store the total number of their steps."""


class Optimizers:
    """The optimizers that the script has built, in the same order on all ranks. Iterates over those that DADT manages,
    oldest first."""

    def __init__(
        self, ranks: Ranks, script: Script, replay: ReplayState, find: Callable[[str], type[Algorithm]]
    ) -> None:
        """find: function that returns the algorithm class for a name."""
        self._ranks, self.script, self._replay, self._find = ranks, script, replay, find
        self._ordinals = itertools.count()
        self._registered: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self.roots: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[weakref.ref[nn.Module]]] = (
            weakref.WeakKeyDictionary()
        )
        """For each optimizer, the modules that the script calls and whose parameters the optimizer trains."""
        self.buffers = Buffers()
        """Buffers of the modules whose parameters the optimizers train."""
        self._made: weakref.WeakKeyDictionary[torch.optim.Optimizer, built.Made] = weakref.WeakKeyDictionary()
        self._schedulers: list[tuple[weakref.ref[Any], built.Scheduler]] = []
        """Learning rate schedulers with their values when built, oldest first."""
        self._compared: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.left_alone: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that DADT does not manage, because the script averages their gradients itself, calls `dadt.init`
        but has not wrapped them, or created their tensors for a single batch."""
        self.one_batch = OneBatch()

    def clear(self) -> None:
        self._registered.clear()
        self.roots.clear()

    @property
    def algorithm(self) -> type[Algorithm]:
        """The algorithm class of all optimizers; `dadt.init` may change it before training begins."""
        config = self._ranks.config
        return self._find("auto" if config.compression == "auto" else config.algorithm)

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        mine = [o for o in self._registered if o not in self.left_alone]
        return iter(sorted(mine, key=lambda o: self._registered[o]))

    def __len__(self) -> int:
        return sum(o not in self.left_alone for o in self._registered)

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer is registered, even if DADT does not manage it."""
        return optimizer in self._registered

    @property
    def registered(self) -> int:
        """Number of registered optimizers, including those that DADT does not manage."""
        return len(self._registered)

    def number(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the optimizer's index among all optimizers built so far."""
        return self._registered[optimizer]

    @property
    def trains_one(self) -> bool:
        """Whether exactly one optimizer trains. Must be cheap, as it is read for each gradient."""
        return len(self._registered) == 1 or len(self) == 1

    def root_modules(self, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
        return [m for ref in self.roots.get(optimizer, ()) if (m := ref()) is not None]

    def trains(self) -> bool:
        """Return whether gradients are enabled and a registered optimizer's model is in training mode."""
        if not torch.is_grad_enabled():
            return False
        every = list(self._registered)
        lasting = [o for o in every if o not in self.one_batch.optimizers]
        roots = [self.root_modules(optimizer) for optimizer in lasting or every]
        # Parameters outside of modules have no training mode, so they always count as training.
        return any(not modules or any(m.training for m in modules) for modules in roots)

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer that was built, or is used for the first time, without attaching it to DADT."""
        self.script.trains_here()
        if optimizer in self._registered:
            return
        if self.script.explicit:
            self._registered[optimizer] = -1
            self.left_alone.add(optimizer)
        else:
            self._enlist(optimizer)

    def built_apart(self, optimizer: torch.optim.Optimizer) -> None:
        """Stop managing an optimizer whose parameters belong to no module, if its kind is known to train tensors of a
        single batch."""
        if self.one_batch.built(optimizer):
            self.left_alone.add(optimizer)

    def is_of_one_batch(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether all ranks find that the optimizer's tensors were created for a single batch. Exchanges their
        findings if the optimizer trains no module."""
        if self.script.explicit or self.roots.get(optimizer):
            return False
        told = self._ranks.collect(
            f"whose tensors optimizer #{self.number(optimizer) + 1} has", self.one_batch.fits(optimizer)
        )
        if all(told):
            self.one_batch.agree(optimizer)
        return all(told)

    def leave_to_script(self) -> None:
        """Manage only optimizers that the script wraps, from now on, because the script calls `dadt.init`."""
        self.script.explicit = True
        self._ordinals = itertools.count()
        self.left_alone.update(self._registered)

    def enlist(self, optimizer: torch.optim.Optimizer) -> None:
        """Manage the optimizer from now on, because the script wraps it. Wrapped optimizers are attached in the order
        of these calls."""
        if optimizer in self.left_alone:
            self.left_alone.discard(optimizer)
            self._registered.pop(optimizer)
        if optimizer not in self._registered:
            self._enlist(optimizer)

    def _enlist(self, optimizer: torch.optim.Optimizer) -> None:
        scaled = [g for o in self._registered for g in o.param_groups]
        self._registered[optimizer] = next(self._ordinals)
        scale, size = self._ranks.config.scale_lr, self._ranks.world.island_size or 1
        shares = self._ranks.shares // size
        factor = {"linear": float(shares), "sqrt": shares**0.5}.get(scale, 1.0)
        if factor != 1.0:
            # A wrapper may share the param_groups of the optimizer inside, which must not be scaled twice.
            for group in (g for g in optimizer.param_groups if not any(g is other for other in scaled)):
                if "lr" not in group:
                    raise ConfigError(
                        f"--scale-lr {scale}: DADT does not know the learning rates of optimizers that"
                        f" are none of torch's; multiply them by {factor:g} in the script"
                    )
                group["lr"] = group["lr"] * factor
        self._made[optimizer] = built.made(optimizer)

    def schedule(self, scheduler: Any) -> None:
        """Note the values of a learning rate scheduler that was just built."""
        self._schedulers = [(ref, made) for ref, made in self._schedulers if ref() is not None]
        self._schedulers.append((weakref.ref(scheduler), built.scheduler(scheduler)))

    def progress(self, optimizer: torch.optim.Optimizer) -> float:
        """Return the share of the training that is over, according to those of the optimizer's learning rate schedulers
        that know its length; 0 if none does."""
        over = [each for ref, _ in self._schedulers if (each := ref()) is not None and each.optimizer is optimizer]
        ends = [(each, vars(each).get(name)) for each in over for name in _LENGTHS]
        return max((each.last_epoch / end for each, end in ends if isinstance(end, int) and end > 0), default=0.0)

    def compare(self, optimizer: torch.optim.Optimizer, which: str, *, loaded: bool) -> None:
        """Raise Mismatch if ranks have built different optimizers or models. Waits for all ranks. loaded: whether this
        rank has loaded state into an optimizer."""
        over = [(each, made) for ref, made in self._schedulers if (each := ref()) is not None]
        schedulers = [(made, each.last_epoch) for each, made in over if each.optimizer is optimizer]
        restored = loaded or optimizer in self._compared
        names, was = self.parameter_names(), self._made.get(optimizer)
        mine = built.build(optimizer, names, was, schedulers, restored=restored)
        told = self._ranks.collect(f"what is built{which}", built.encoded(mine))
        built.check([built.decoded(each) for each in told], self._ranks.members, which)
        self._compared.add(optimizer)

    def parameter_names(self) -> Mapping[int, str]:
        modules = [m for refs in self.roots.values() for ref in refs if (m := ref()) is not None]
        return {id(p): name for module in modules for name, p in module.named_parameters()}

    def leave_alone(self, optimizer: torch.optim.Optimizer, reason: str) -> None:
        """Stop managing this optimizer, so that its gradients are not averaged, and inform the user of the reason."""
        self.left_alone.add(optimizer)
        name = name_of(optimizer)
        self._ranks.say(f"{name} is left alone: {reason}")
        # Ranks may be at different steps of an optimizer that DADT does not manage, so its state is different on each
        # rank.
        self._replay.take_no_snapshots(f"{name} is left alone")
