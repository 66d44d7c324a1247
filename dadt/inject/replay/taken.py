"""What a snapshot holds, as it is between two steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from dadt.errors import CommError
from dadt.inject.data.seed import State, Streams
from dadt.inject.replay import variables
from dadt.inject.replay.copies import Copies, CopyMemory
from dadt.inject.replay.roster import Roster
from dadt.inject.replay.values import ReadValues
from dadt.train.checkpoint import KEY
from dadt.train.observation import Observation
from dadt.train.runtime import Runtime


class Taken:
    """All ranks take it after the same step."""

    def __init__(self, runtime: Runtime, roster: Roster, values: ReadValues, streams: Streams) -> None:
        self._runtime, self._roster, self._values, self._streams = runtime, roster, values, streams
        self._built = -1
        self.at_start: dict[str, Any] | None = None
        """The random numbers with which the script began, where nothing has seeded them for it."""

    def take(self, frame: FrameType, *, common: bool) -> dict[str, Any]:
        """A copy on the host of what is this rank's own, and of what all have in common, for a new worker: what is one
        rank's alone gives way to the average. frame: below the script's. Where ranks are lost meanwhile, those that
        are left do it once more."""
        while True:
            try:
                return self._take(frame, common=common)
            except CommError as error:
                self._runtime.ranks.regroup(error)

    def _take(self, frame: FrameType, *, common: bool) -> dict[str, Any]:
        r = self._runtime
        gc.collect()  # what is garbage on some ranks may be none on others
        with r.checkpoints.by_all():
            optimizers = {r.optimizers.number(optimizer): optimizer.state_dict() for optimizer in r.optimizers}
        r.show_true_weights()
        content = self._own(frame)
        if common:
            content |= {"tensors": dict(self._roster.tensors()), "optimizers": optimizers, **self._built_beside()}
        copied = Copies(CopyMemory()).now(content)
        assert isinstance(copied, dict)
        return copied

    def _own(self, frame: FrameType) -> dict[str, Any]:
        """What a snapshot holds of this rank's script alone: its step, the values that it has read, random state and
        variables."""
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
        """Whether a script can go on from here: not in the midst of a pass, nor where averages wait for their step."""
        return not self._runtime.prediction_scope.under_way and not any(a.consumed for a in self._runtime.attachments)

    @property
    def rests(self) -> bool:
        """Whether nothing is under way that would be left out: the same on all ranks."""
        return all(a.algorithm.rests for a in self._runtime.attachments)

    def observe(self, frame: FrameType, room: CopyMemory, *, common: bool) -> SeenSnapshot:
        """Waits for nobody, and changes nothing. frame: below the script's."""
        if self._built != (built := self._roster.built):
            gc.collect()  # what was built before may be garbage by now
            self._built = built
        return SeenSnapshot(
            self._runtime, self._roster, self._own(frame), self._built_beside() if common else None, room
        )


class SeenSnapshot:
    """One snapshot: seen behind a step, and complete before the next one changes anything."""

    def __init__(
        self, runtime: Runtime, roster: Roster, content: dict[str, Any], beside: dict[str, Any] | None, room: CopyMemory
    ) -> None:
        """content: of the script. beside: what all ranks have in common beside their models; None where another rank
        writes that."""
        r = self._runtime = runtime
        self._copies = copies = Copies(room)
        self._training = {r.optimizers.number(a.optimizer): Observation(a) for a in r.attachments if a.alive}
        with r.checkpoints.aside():
            states = {r.optimizers.number(optimizer): optimizer.state_dict() for optimizer in r.optimizers}
        self.content = copies.now(content)
        self.content["buffers"] = copies.now(dict(roster.buffers()))
        self.content["averaged"] = copies.now(list(_averaged(r, roster)))
        if not all(a.algorithm.identical for a in r.attachments):
            self.content["weights"] = copies.now(dict(roster.tensors()))
            self.content["states"] = copies.later(states)
        self._common = beside is not None
        if beside is not None:
            self.content |= copies.now(beside)
            self.content["tensors"] = copies.now({**dict(roster.tensors()), **dict(_official(r, roster))})
            self.content["optimizers"] = copies.later(states)
            self._predictions = copies.now({number: each.prediction for number, each in self._training.items()})
        self.content["training"] = copies.later({number: each.own for number, each in self._training.items()})
        copies.begin()

    def complete(self) -> bool:
        """The next step begins. Whether all is as it was behind the last one. Raises CommError."""
        same = self._copies.finish()
        alive = {number: each for number, each in self._training.items() if each.attachment.alive}
        for each in alive.values():
            each.complete()
        self.content["training"] = {number: self.content["training"][number] for number in alive}
        for number, each in alive.items():
            late = {key: each.own[key] for key in ("owes", "in_flight")}
            self.content["training"][number].update(self._copies.now(late))
            if self._common:
                part = self._runtime.checkpoints.common(each.attachment, each.state(), self._predictions[number])
                self.content["optimizers"][number][KEY] = part
        self._training.clear()  # which are not to live on with it
        return same

    def over(self) -> None:
        """It is written, or of no use."""
        self._copies.over()


def _averaged(runtime: Runtime, roster: Roster) -> Iterator[list[Any]]:
    for module, names, official, own in runtime.buffers.observe():
        if (number := roster.number(module)) is not None:
            yield [number, names, official, own]


def _official(runtime: Runtime, roster: Roster) -> Iterator[tuple[str, torch.Tensor]]:
    for module, _, official, own in runtime.buffers.observe():
        if own is None and (number := roster.number(module)) is not None:  # else it shows it
            for name, value in official.items():
                yield f"{number}.{name}", value
