"""Collects, between two steps, the content of a snapshot."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from dadt.errors import CommError
from dadt.inject.data.seed import State, Streams
from dadt.inject.replay import variables
from dadt.inject.replay.base import Base
from dadt.inject.replay.copies import Copies, CopyMemory
from dadt.inject.replay.roster import Roster
from dadt.inject.replay.values import ReadValues
from dadt.train.checkpoint import KEY
from dadt.train.observation import Observation
from dadt.train.runtime import Runtime


class Taken:
    """Collects the state for a snapshot or a new worker. All ranks do so after the same step."""

    def __init__(self, runtime: Runtime, roster: Roster, values: ReadValues, streams: Streams) -> None:
        self._runtime, self._roster, self._values, self._streams = runtime, roster, values, streams
        self._built = -1
        self._base = Base(runtime.replicas.digests)
        self.at_start: dict[str, Any] | None = None
        """State of the random generators with which the script began, if nothing has seeded them; otherwise None."""

    def take(self, frame: FrameType, *, common: bool) -> dict[str, Any]:
        """Return a copy in host memory of this rank's own state and, with `common`, of the state that all ranks share,
        for a new worker: values that differ between ranks are replaced by averages, and `frozen` holds the script's own
        tensors that stay as they are, with digests, by name. frame: the caller's frame, which the script's frames have
        called. If ranks are lost meanwhile, the remaining ranks collect again.
        """
        while True:
            try:
                return self._take(frame, common=common)
            except CommError as error:
                self._runtime.ranks.regroup(error)

    def _take(self, frame: FrameType, *, common: bool) -> dict[str, Any]:
        r = self._runtime
        gc.collect()  # garbage may be freed already on some ranks and not yet on others
        with r.checkpoints.by_all():
            optimizers = {r.optimizers.number(optimizer): optimizer.state_dict() for optimizer in r.optimizers}
        r.show_true_weights()
        content = self._own(frame)
        if common:
            every = dict(self._roster.tensors())
            kept = self._base.steady(every)
            content |= {"tensors": without(every, kept), "optimizers": optimizers, **self._built_beside()}
        copied = Copies(CopyMemory()).now(content)
        assert isinstance(copied, dict)
        return {**copied, "frozen": {name: (every[name], d) for name, d in kept.items()}} if common else copied

    def _own(self, frame: FrameType) -> dict[str, Any]:
        """Return the entries of a snapshot about this rank's script: the step, the values it has read from tensors, the
        random generators' states, and tensors in its variables."""
        content: dict[str, Any] = {"step": self._runtime.ranks.step, "values": self._values.as_tensor()}
        content["random"] = self._streams.state() or {"own": State.capture().plain()}
        models = [tensor for _, tensor in self._roster.tensors()]
        content["variables"] = dict(variables.held(frame, models, self._roster.attributes()))
        content["counts"], content["at_start"] = self._roster.counts(), self.at_start
        return content

    def _built_beside(self) -> dict[str, Any]:
        return {
            "schedulers": {number: each.state_dict() for number, each in self._roster.schedulers().items()},
            "scalers": {number: each.state_dict() for number, each in self._roster.scalers().items()},
        }

    @property
    def possible(self) -> bool:
        """Whether the script could resume from this point. It cannot between a forward and its backward, nor while
        averaged gradients wait for the optimizer's step."""
        return not self._runtime.prediction_scope.under_way and not any(a.consumed for a in self._runtime.attachments)

    @property
    def rests(self) -> bool:
        """Whether no exchange is in progress whose result a snapshot would lack. The same on all ranks."""
        return all(a.algorithm.rests for a in self._runtime.attachments)

    def observe(self, frame: FrameType, room: CopyMemory, *, common: bool) -> SeenSnapshot:
        """Begin a snapshot, without waiting for other ranks or changing anything. frame: the caller's frame, which the
        script's frames have called."""
        if self._built != (built := self._roster.built):
            gc.collect()  # removes objects that have become garbage, so that the snapshot leaves them out
            self._built = built
        beside = self._built_beside() if common else None
        return SeenSnapshot(self._runtime, self._roster, self._own(frame), beside, self._base, room)


class SeenSnapshot:
    """One snapshot: begun after a step, and completed before the next step changes anything."""

    def __init__(
        self,
        runtime: Runtime,
        roster: Roster,
        content: dict[str, Any],
        beside: dict[str, Any] | None,
        base: Base,
        room: CopyMemory,
    ) -> None:
        """content: the entries about this rank's script. beside: state of schedulers and scalers, which all ranks have
        in common; None if another rank writes the common state."""
        r = self._runtime = runtime
        self._copies = copies = Copies(room)
        self._training = {r.optimizers.number(a.optimizer): Observation(a) for a in r.attachments if a.alive}
        with r.checkpoints.aside():
            states = {r.optimizers.number(optimizer): optimizer.state_dict() for optimizer in r.optimizers}
        self.content = copies.now(content)
        every, buffers = dict(roster.tensors()), dict(roster.buffers())
        is_apart = not all(a.algorithm.identical for a in r.attachments)
        shared = base.shared({**buffers, **(every if is_apart else {})})
        self.content["buffers"] = copies.now(without(buffers, shared))
        self.content["averaged"] = copies.now(list(_averaged(r, roster)))
        if is_apart:
            self.content["weights"] = copies.now(without(every, shared))
            self.content["states"] = copies.later(states)
        self._common = beside is not None
        self.base: dict[int, torch.Tensor] = {}
        """The frozen tensors that are stored in files next to the snapshots, by digest. They are the script's own
        tensors, not copies."""
        if beside is not None:
            self.content |= copies.now(beside)
            official = dict(_official(r, roster))
            if kept := base.common(without(every, official.keys())):
                self.content["base"] = kept
                self.base = {digest: every[name] for name, digest in kept.items()}
            self.content["tensors"] = copies.now({**without(every, kept.keys()), **official})
            self.content["optimizers"] = copies.later(states)
            self._predictions = copies.now({number: each.prediction for number, each in self._training.items()})
        # The next forward replaces these by predicted weights in the C++ core, which the version counters do not count.
        copies.now([each.own["prediction"].get("expected", []) for each in self._training.values()])
        self.content["training"] = copies.later({number: each.own for number, each in self._training.items()})
        copies.begin()

    def complete(self) -> bool:
        """Called when the next step begins: wait for the copies, and add the results of exchanges that ended meanwhile.
        Return whether no tensor has changed since the last step. Raises CommError."""
        same = self._copies.finish()
        alive = {number: each for number, each in self._training.items() if each.attachment.alive}
        for each in alive.values():
            each.complete()
        self.content["training"] = {number: self.content["training"][number] for number in alive}
        for number, each in alive.items():
            late = {key: each.own[key] for key in ("owes", "in_flight", "idle")}
            self.content["training"][number].update(self._copies.now(late))
            if self._common:
                part = self._runtime.checkpoints.common(each.attachment, each.state(), self._predictions[number])
                self.content["optimizers"][number][KEY] = part
        self._training.clear()  # no longer needed, but this object exists until the snapshot is written
        return same

    def over(self) -> None:
        """Release the memory of the copies, after the snapshot was written or dropped."""
        self._copies.over()


def without(tensors: Mapping[str, torch.Tensor], names: Collection[str]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def _averaged(runtime: Runtime, roster: Roster) -> Iterator[list[Any]]:
    for module, names, official, own in runtime.buffers.observe():
        if (number := roster.number(module)) is not None:
            yield [number, names, official, own]


def _official(runtime: Runtime, roster: Roster) -> Iterator[tuple[str, torch.Tensor]]:
    for module, _, official, own in runtime.buffers.observe():
        # If `own` is not None, the module already shows the averaged buffers, and its own ones are stored aside.
        if own is None and (number := roster.number(module)) is not None:
            for name, value in official.items():
                yield f"{number}.{name}", value
