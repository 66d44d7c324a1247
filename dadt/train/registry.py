"""The optimizers of a script: which there are, which of them train data-parallel, and of which modules."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dadt.config import Config
from dadt.errors import ConfigError
from dadt.train import built
from dadt.train.attachment import Attachment
from dadt.train.one_batch import OneBatch
from dadt.train.peers import Peers
from dadt.world import World

if TYPE_CHECKING:
    from dadt.control.worker_line import WorkerLine


class Registry(Peers):
    """The optimizers that a rank trains. They come in the same order on all ranks."""

    def __init__(self, world: World, config: Config, control: WorkerLine | None) -> None:
        super().__init__(world, config, control)
        self.shares = world.world_size
        """Parts of the data, one for each rank that the job began with; of a resumed job, as many as it had before."""
        self._training_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._ordinals = itertools.count()
        self._registered: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._attachments: weakref.WeakKeyDictionary[torch.optim.Optimizer, Attachment] = weakref.WeakKeyDictionary()
        self.roots: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[weakref.ref[nn.Module]]] = (
            weakref.WeakKeyDictionary()
        )
        """The modules that the script calls, whose parameters an optimizer trains."""
        self._made: weakref.WeakKeyDictionary[torch.optim.Optimizer, built.Made] = weakref.WeakKeyDictionary()
        self._schedulers: list[tuple[weakref.ref[Any], built.Scheduler]] = []
        """Learning rate schedulers as they were built, oldest first."""
        self._compared: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.own_numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[str]] = weakref.WeakKeyDictionary()
        """Numbers in an optimizer's attributes, by their places, that differ between ranks, as a rank's number does."""
        self.explicit = False
        """Whether the script has called `dadt.init`: nothing is DADT's business but the optimizers that it wraps."""
        self.left_alone: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers whose gradients the script averages itself, or not wrapped where it calls `dadt.init`, or over
        tensors of one batch."""
        self.one_batch = OneBatch()
        self.knows_rank = world.rank_in_arguments
        """Whether the script has asked which rank it is."""
        self.backwards = 0
        """Backward passes that the script has begun."""
        self._distributed = False

    @property
    def hooked(self) -> bool:
        """Whether calls of modules and passes over loaders are of concern: for training, or for a replay."""
        return not self.alone or self.replays

    @property
    def registered(self) -> bool:
        return len(self._registered) > 0

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All that were built so far and are not left alone, oldest first."""
        mine = [o for o in self._registered if o not in self.left_alone]
        return sorted(mine, key=lambda o: self._registered[o])

    def number(self, optimizer: torch.optim.Optimizer) -> int:
        """The optimizer's place among all that were built so far."""
        return self._registered[optimizer]

    @property
    def trains_one(self) -> bool:
        """Whether there is just one optimizer to train. Cheap, as it is asked for every gradient."""
        return len(self._registered) == 1 or len(self.optimizers) == 1

    @property
    def attachments(self) -> list[Attachment]:
        """The attachments of all optimizers that train, oldest first."""
        return sorted(self._attachments.values(), key=lambda a: a.index)

    @property
    def script_is_distributed(self) -> bool:
        """The script has a process group and knows its rank, or calls `dadt.init`: what it shares out and saves is its
        business."""
        # Also once it has destroyed the group: what it writes then it still writes by rank.
        self._distributed |= torch.distributed.is_available() and torch.distributed.is_initialized()
        return self.explicit or (self._distributed and self.knows_rank)

    def root_modules(self, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
        return [m for ref in self.roots.get(optimizer, ()) if (m := ref()) is not None]

    def trains(self) -> bool:
        """Whether gradients are enabled and a registered optimizer's model is in training mode."""
        if not torch.is_grad_enabled():
            return False
        every = list(self._registered)
        lasting = [o for o in every if o not in self.one_batch.optimizers]
        roots = [self.root_modules(optimizer) for optimizer in lasting or every]
        # Parameters of no module have no mode: they train.
        return any(not modules or any(m.training for m in modules) for modules in roots)

    @property
    def on_training_thread(self) -> bool:
        """Optimizers were built or used on this thread: what it does has its place among the steps, the same on all
        ranks. What another one does, such as reading batches ahead, has none."""
        return threading.current_thread() in self._training_threads

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was built (or is first seen). Claims nothing."""
        self._training_threads.add(threading.current_thread())
        if optimizer in self._registered:
            return
        if self.explicit:
            self._registered[optimizer] = -1
            self.left_alone.add(optimizer)
        else:
            self._enlist(optimizer)

    def built_apart(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was built whose parameters belong to no module."""
        if optimizer not in self._attachments and self.one_batch.built(optimizer):
            self.left_alone.add(optimizer)

    def is_of_one_batch(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether all ranks take it for one over tensors of one batch. Asks them, where it trains no module."""
        if self.explicit or self.roots.get(optimizer):
            return False
        told = self.collect(
            f"whose tensors optimizer #{self.number(optimizer) + 1} has", self.one_batch.fits(optimizer)
        )
        if all(told):
            self.one_batch.agree(optimizer)
        return all(told)

    def leave_to_script(self) -> None:
        """The script calls `dadt.init`: only optimizers that it wraps train."""
        self.explicit = True
        self._ordinals = itertools.count()
        self.left_alone.update(self._registered)

    def enlist(self, optimizer: torch.optim.Optimizer) -> None:
        """The script wraps the optimizer: it trains, and those wrapped are attached in the order of these calls."""
        if optimizer in self.left_alone:
            self.left_alone.discard(optimizer)
            self._registered.pop(optimizer)
        if optimizer not in self._registered:
            self._enlist(optimizer)

    def _enlist(self, optimizer: torch.optim.Optimizer) -> None:
        scaled = [g for o in self._registered for g in o.param_groups]
        self._registered[optimizer] = next(self._ordinals)
        factor = {"linear": float(self.shares), "sqrt": self.shares**0.5}.get(self.config.scale_lr, 1.0)
        if factor != 1.0:
            # A wrapper may have the very groups of the optimizer inside.
            for group in (g for g in optimizer.param_groups if not any(g is other for other in scaled)):
                if "lr" not in group:
                    raise ConfigError(
                        f"--scale-lr {self.config.scale_lr}: DADT does not know the learning rates of optimizers that"
                        f" are none of torch's; multiply them by {factor:g} in the script"
                    )
                group["lr"] = group["lr"] * factor
        self._made[optimizer] = built.made(optimizer)

    def schedule(self, scheduler: Any) -> None:
        """A learning rate scheduler was built: note it as it is."""
        self._schedulers = [(ref, made) for ref, made in self._schedulers if ref() is not None]
        self._schedulers.append((weakref.ref(scheduler), built.scheduler(scheduler)))

    def compare(self, optimizer: torch.optim.Optimizer, which: str, *, loaded: bool) -> None:
        """Raises Mismatch where ranks have built different things. Waits for all. loaded: this rank has loaded state
        into an optimizer."""
        over = [(each, made) for ref, made in self._schedulers if (each := ref()) is not None]
        schedulers = [(made, each.last_epoch) for each, made in over if each.optimizer is optimizer]
        restored = loaded or optimizer in self._compared
        names, was = self.parameter_names(), self._made.get(optimizer)
        mine = built.build(optimizer, names, was, schedulers, restored=restored)
        told = self.collect(f"what is built{which}", built.encoded(mine))
        built.check([built.decoded(each) for each in told], self.members, which)
        self._compared.add(optimizer)

    def attached(self, optimizer: torch.optim.Optimizer) -> Attachment | None:
        """The optimizer's attachment, if it has one by now."""
        return self._attachments.get(optimizer)

    def sharing(self, ids: set[int]) -> list[Attachment]:
        """The attachments whose gradients are used where those of these parameters (by id) are: the newest
        that owns just them, or as many, newest first, as it takes to have them all."""
        mine = [(a, {id(p) for p in a.parameters}) for a in reversed(self.attachments)]
        exact = [a for a, owned in mine if owned and owned == ids]
        if exact:
            return exact[:1]
        chosen: list[Attachment] = []
        for a, owned in mine:
            if owned & ids:
                chosen.append(a)
                ids = ids - owned
        return chosen

    def discard_averages(self, ids: set[int]) -> None:
        """The script drops gradients of these parameters: averages that no step has used are left out, where nothing
        is left of them."""
        for attachment in self.attachments:
            mine = attachment.parameters if attachment.consumed and not attachment.stepping else []
            others = [p for p in mine if id(p) not in ids]
            # In a step that applies nothing all gradients are zeros.
            kept = bool(others) and (attachment.algorithm.holds or any(map(_counts, others)))
            if len(others) < len(mine) and not kept:
                attachment.skipped()

    def release_other_predictions(self, attachment: Attachment) -> None:
        """Called before its step: no other optimizer's prediction may stand in parameters that it is to change."""
        others = [other for other in self._attachments.values() if other is not attachment]
        ids = {id(p) for p in attachment.parameters} if others else set()
        for other in others:
            other.prediction.release(ids)

    def parameter_names(self) -> Mapping[int, str]:
        modules = [m for refs in self.roots.values() for ref in refs if (m := ref()) is not None]
        return {id(p): name for module in modules for name, p in module.named_parameters()}


def _counts(parameter: torch.Tensor) -> bool:
    """Whether the parameter has a gradient that is not zero."""
    gradient = parameter.grad
    if gradient is not None and gradient.layout != torch.strided:
        gradient = gradient.coalesce().values()
    return gradient is not None and bool(gradient.any())
