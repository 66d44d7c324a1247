"""Copies weights, buffers and optimizer state between ranks, so that every optimizer trains equal values on all
ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from dadt.comm import plain
from dadt.comm.bucket import DTYPES
from dadt.comm.shards import local, place
from dadt.errors import Mismatch
from dadt.train import optimizer_state
from dadt.train.algorithm import Attached
from dadt.train.digest import as_bytes
from dadt.train.frozen import Digests, Part, Spared, chosen, digests_of, quantization, to_send
from dadt.train.optimizers import Optimizers
from dadt.train.param_groups import group_values, take_values
from dadt.train.ranks import Ranks
from dadt.train.trained import listed


class Replicas:
    """Copies the weights, buffers and state that optimizers train between ranks. Every rank calls the methods that
    exchange data in the same order, on the script's training thread."""

    def __init__(
        self,
        ranks: Ranks,
        optimizers: Optimizers,
        attachments: Iterable[Attached],
        aside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """aside: function that returns a context in which DADT itself, not the script, reads and sets optimizers'
        states."""
        self._ranks, self._optimizers, self._attachments = ranks, optimizers, attachments
        self.aside = aside
        self.given: list[Any] = []
        """On a rank that joins a running job, the received weights, buffers and optimizer state of each optimizer, in
        order; empty on other ranks.
        """
        self.digests = WeakTensorKeyDictionary()
        """Digests of tensors that are not trained (frozen parameters and buffers), from the time when the tensors were
        last found or made equal on all ranks."""
        self._own_numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[str]] = weakref.WeakKeyDictionary()
        """For each optimizer, paths of numbers in its attributes that differ between ranks, such as a rank's own
        number."""
        self._between_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Part]] = weakref.WeakKeyDictionary()
        """For each optimizer, the tensors that `remember` has found."""

    def take_first(self, attachment: Attached, *, weights: bool) -> None:
        """Set this optimizer's param_group values to the first rank's. weights: whether to copy weights, buffers and
        optimizer state as well. Raises Mismatch if the ranks train different models."""
        with self.aside():
            self._take_first(attachment, weights=weights)

    def _take_first(self, attachment: Attached, *, weights: bool) -> None:
        optimizer = attachment.optimizer
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        shapes = [(tuple(p.shape), place(p)) for p in parameters]
        first = self._ranks.group.rank == 0
        if weights:
            # The last changes of this rank's old weights do not predict rank 0's weights.
            attachment.prediction.forget()
        state = optimizer_state.encode(optimizer) if first and weights else b""
        parts = self._parts(attachment) if weights else []
        told = digests_of(parts, {id(p) for p in attachment.parameters})
        mine = (shapes, group_values(optimizer, wait=True), state, optimizer_state.numbers(optimizer), told)
        theirs = self._ranks.collect(f"start{attachment.name}", mine)
        for rank, (other, *_) in zip(self._ranks.members, theirs, strict=True):
            if other != theirs[0][0]:
                raise Mismatch(
                    f"rank {rank} trains {_count(other)} and rank {self._ranks.members[0]} {_count(theirs[0][0])}"
                    f"{attachment.name}: every rank must build the same model"
                )
        take_values(optimizer, theirs[0][1])
        # Numbers that differ between ranks are specific to each rank, such as its own rank number, and are not copied.
        counts = [each[3].items() for each in theirs]
        self._own_numbers[optimizer] = {name for each in counts for name, _ in each ^ counts[0]}
        if weights:
            self._take_parts(attachment, parts, [each[4] for each in theirs])
            if not first:
                optimizer_state.load(optimizer, theirs[0][2], without=self._own_numbers[optimizer])

    def _take_parts(self, attachment: Attached, parts: Sequence[Part], told: Sequence[Digests]) -> None:
        """Set the tensors of all parts to the first rank's, which sends only those that other ranks need. told: each
        rank's digests of the tensors."""
        flags = to_send(told[0], told[1:])
        for part in chosen(parts, flags):
            self._broadcast(part.values, f"{part.what}{attachment.name}")
        if text := Spared.of(parts, told[0], flags).sentence(attachment.name, self._ranks.members[0]):
            self._ranks.say(text)
        owners = [owner for part in parts for owner in part.owners]
        self.digests.update({o: d for o, d in zip(owners, told[0], strict=False) if d is not None})

    def take_first_groups(self, attachment: Attached) -> None:
        """Set param_group values to the first rank's, if the script sets them on each rank in each step."""
        theirs = self._ranks.collect(f"param_groups{attachment.name}", group_values(attachment.optimizer, wait=True))
        take_values(attachment.optimizer, theirs[0])

    def catch_up(self, attachment: Attached, root: int, *, behind: bool) -> None:
        """Copy weights, buffers and optimizer state from the group's rank `root` if this rank is behind. Nothing is
        changed before everything has arrived, in case a rank is lost meanwhile. All ranks call this method."""
        gives = self._ranks.group.rank == root
        # If ranks do not wait for each other, the training thread continues meanwhile, so values are copied during a
        # pause.
        reads = gives and not attachment.algorithm.together
        with self._ranks.reconnection.pause.still(self._ranks.config.timeout) if reads else nullcontext():
            state = self._state(attachment.optimizer) if gives else b""
            attachment.prediction.forget()
            parts = self._parts(attachment, self._common())
            mine = digests_of(parts, {id(p) for p in attachment.parameters})
            if reads:
                parts = self._copied(parts, mine)
        lanes = self._ranks.tell("state", plain.encode((state, mine, behind), "what a rank has"))
        told = [plain.decode(lane) for lane in lanes]
        flags = to_send(told[root][1], [digests for _, digests, is_behind in told if is_behind])
        came: list[tuple[torch.Tensor, torch.Tensor]] = []
        for part in chosen(parts, flags):
            places = part.values if gives else [torch.empty_like(t) for t in part.values]
            what = f"{part.what} of rank {self._ranks.members[root]}{attachment.name}"
            self._broadcast(places, what, root)
            came += zip(part.values, places, strict=True)
        if behind:
            with torch.no_grad():
                for tensor, value in came:
                    tensor.copy_(value)
            optimizer_state.load(attachment.optimizer, told[root][0])

    def _broadcast(self, values: Sequence[torch.Tensor], what: str, root: int = 0) -> None:
        """Overwrite the values with those of the group's rank `root`. Values of dtypes that the C++ engine does not
        know are sent as bytes."""
        sent = [(value, value if value.dtype in DTYPES else as_bytes(value)) for value in values if value.numel()]
        self._ranks.broadcast([each for _, each in sent], what, root)
        for value, each in sent:
            if each.data_ptr() != value.data_ptr():
                value.copy_(each.view(value.dtype).view(value.shape))

    def _copied(self, parts: Sequence[Part], digests: Digests) -> list[Part]:
        """Return the parts with copies of all values that training may change; values that are not trained and have not
        changed since the start are not copied."""
        left, copied = iter(digests), []
        for part in parts:
            values = [
                value if found is not None and owner in self.digests and self.digests[owner] == found else value.clone()
                for (owner, value), found in zip(part.named, left, strict=False)
            ]
            copied.append(Part(part.what, part.owners, values))
        return copied

    def known(self) -> list[list[list[int | None]]]:
        """Return digests of the tensors that this rank has before it joins the job, for each optimizer and part. `give`
        leaves out tensors with these digests."""
        return [[digests_of([part], ()) for part in self._every_part(optimizer)] for optimizer in self._optimizers]

    def give(self, known: Sequence[Sequence[Sequence[Digests]]]) -> bytes:
        """Return weights, buffers, optimizer state and param_group values of all optimizers, encoded for new ranks.
        known: the results of `known` on each new rank."""
        with self._ranks.reconnection.pause.still(self._ranks.config.timeout):
            given = []
            for number, a in enumerate(self._attachments):
                found = self._between_steps.get(a.optimizer) or self._every_part(a.optimizer)
                parts = [
                    self._missing(part, {id(p) for p in a.parameters}, [every[number][place] for every in known])
                    for place, part in enumerate(found)
                ]
                ever = [p in a.listing.ever for p in listed(a.optimizer)]
                given.append([parts, self._state(a.optimizer), group_values(a.optimizer, wait=True), ever])
            return plain.encode(given, "what a new rank is given")

    def remember(self, attachment: Attached) -> None:
        """Called by the training thread between two steps: find the tensors that `give` reads in another thread. During
        forward and backward passes FSDP puts whole parameters in the place of this rank's parts, and frees them."""
        self._between_steps[attachment.optimizer] = self._every_part(attachment.optimizer)

    def _missing(self, part: Part, trained: set[int], known: Sequence[Digests]) -> list[torch.Tensor | None]:
        """Return the part's values, with None for values that are not trained and that all new ranks have. known: each
        new rank's digests of this part, which may be fewer if the rank does not know all modules yet."""
        mine = digests_of([part], trained)
        there = [[*digests, *[None] * (len(mine) - len(digests))] for digests in known]
        needed = to_send(mine, [digests[: len(mine)] for digests in there])
        return [value.cpu() if needs else None for value, needs in zip(part.values, needed, strict=True)]

    def take_given(self, attachment: Attached) -> None:
        """Start from the state that another rank has sent. Raises Mismatch if this rank trains another model."""
        given, state, values, ever = self.given[attachment.index]
        mine = [part.values for part in self._every_part(attachment.optimizer)]
        pairs = [pair for each, theirs in zip(mine, given, strict=True) for pair in zip(each, theirs, strict=False)]
        fewer = any(len(each) > len(theirs) for each, theirs in zip(mine, given, strict=True))
        if fewer or any(value is not None and tensor.shape != value.shape for tensor, value in pairs):
            raise Mismatch(
                f"rank {self._ranks.world.rank} trains{attachment.name} another model than the job that it joins:"
                " every rank must build the same model"
            )
        with torch.no_grad():
            for tensor, value in pairs:
                if value is not None:
                    tensor.copy_(value)
        parameters = listed(attachment.optimizer)
        attachment.listing.ever.update({p: True for p, trained in zip(parameters, ever, strict=False) if trained})
        take_values(attachment.optimizer, values)
        optimizer_state.load(attachment.optimizer, state)

    def tensors(self, attachment: Attached) -> dict[str, torch.Tensor]:
        """Return, by name, the tensors that are equal on all ranks after each step: weights that the optimizer trains,
        and untrained weights of the same modules; with `--verify-every` also the optimizer's state."""
        optimizer, common, found = attachment.optimizer, self._common(), dict[str, Any]()
        for name, p in self._named(attachment):
            found[name] = common.get(id(p), local(p.data)).to(p.dtype)
            state = getattr(optimizer, "state", {}).get(p) if self._ranks.config.verify_every else None
            if isinstance(state, dict):
                found.update({f"{key} of {name}": state[key] for key in sorted(state, key=str)})
        if self._ranks.config.verify_every:
            kept = optimizer_state.tensors(optimizer)
            found.update({f"{path} of {type(optimizer).__name__}": t for path, t in kept.items()})
        tensors = {name: local(t) for name, t in found.items() if isinstance(t, torch.Tensor)}
        return {name: t for name, t in tensors.items() if t.layout == torch.strided and t.device.type != "meta"}

    def untrained(self, attachment: Attached) -> dict[str, torch.Tensor]:
        """Return the frozen parameters of the optimizer's modules, by the names that `tensors` gives them."""
        trained = {id(p) for p in attachment.parameters}
        return {name: p for name, p in self._named(attachment) if id(p) not in trained and not p.requires_grad}

    def _named(self, attachment: Attached) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters that the optimizer trains, and untrained ones of the same modules, with names."""
        optimizer = attachment.optimizer
        others = {id(p) for o in self._optimizers if o is not optimizer for p in listed(o)}
        beside = [p for m in self._optimizers.root_modules(optimizer) for p in m.parameters() if id(p) not in others]
        names, given = self._optimizers.parameter_names(), set[str]()
        every = dict.fromkeys([*listed(optimizer), *beside])
        # Leave out parameters that the script has added and whose values were not copied from the first rank yet.
        added = {id(p) for p in listed(optimizer) if p not in attachment.known}
        for number, p in enumerate(p for p in every if id(p) not in added):
            name = names.get(id(p)) or f"parameter {number}"
            name = f"{name}, parameter {number}" if name in given else name
            given.add(name)
            yield name, p

    def _parts(self, attachment: Attached, common: Mapping[int, torch.Tensor] | None = None) -> list[Part]:
        """Return all parts of the attachment's optimizer. After the first step, buffers that are not averaged are left
        out, because they may differ in shape between ranks."""
        weights, buffers, *others = self._every_part(attachment.optimizer, common)
        if attachment.step:
            averaged = [b for _, _, b in attachment.buffers()]
            buffers = Part(buffers.what, averaged, [local(b.data) for b in averaged])
        return [weights, buffers, *others]

    def _every_part(
        self, optimizer: torch.optim.Optimizer, common: Mapping[int, torch.Tensor] | None = None
    ) -> list[Part]:
        """Return three parts: the true (not predicted) weights, with the optimizer's own first; the buffers; and the
        quantization data of packed weights. A rank that has just begun may not know all modules' tensors yet. common:
        tensors to use in place of parameters' weights, by the parameter's id."""
        common = common or {}
        for other in self._attachments:  # root modules may contain other optimizers' parameters, too
            other.prediction.suspend()
        # The root modules also contain parameters that the optimizer does not train, such as a frozen part of the
        # model.
        roots = self._optimizers.root_modules(optimizer)
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        every = list(dict.fromkeys([*parameters, *(p for m in roots for p in m.parameters())]))
        buffers, beside = [b for m in roots for b in m.buffers()], quantization(every)
        return [
            Part("weights", every, [common.get(id(p), local(p.data)).to(p.dtype) for p in every]),
            Part("buffers", buffers, [local(b.data) for b in buffers]),
            Part("quantization", beside, [t.data for t in beside]),
        ]

    def _common(self) -> dict[int, torch.Tensor]:
        return {key: value for a in self._attachments for key, value in a.algorithm.common().items()}

    def _state(self, optimizer: torch.optim.Optimizer) -> bytes:
        return optimizer_state.encode(optimizer, without=self._own_numbers.get(optimizer, ()))


def checksum(tensor: torch.Tensor) -> int:
    """Return the sum of the tensor's bytes as 64-bit integers, which is fast to compute and differs if any single value
    changes."""
    values = as_bytes(local(tensor).detach())
    if values.storage_offset() % 8:
        values = values.clone()
    whole = len(values) // 8 * 8
    return int(values[:whole].view(torch.int64).sum() + values[whole:].sum(dtype=torch.int64))


def _count(shapes: Sequence[tuple[tuple[int, ...], str]]) -> str:
    parts = sorted({where for _, where in shapes if where})
    sharded = f", sharded {', '.join(parts)}" if parts else ""
    return f"{len(shapes)} parameters of {sum(torch.Size(s).numel() for s, _ in shapes):,} values{sharded}"
