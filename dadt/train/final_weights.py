"""Compares the ranks' weights once, at the end, so that a job whose replicas differ fails with an error.

A script may change weights freely after its last step: one rank may load its best weights, another may load an average.
So the weights right after the last step are compared. For this, each step records the parameters' autograd versions and
copies a few values of one parameter, a different one in each step. The copy shows whether values were changed later
without a new version (by `.data`); copies that differ between ranks show that weights differed before, whatever the
script has changed since.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dadt.comm.shards import local
from dadt.errors import WeightsDiffer
from dadt.train.attachment import Attachment
from dadt.train.attachments import Attachments
from dadt.train.exchange.fingerprint import is_dense, of_values, some_values
from dadt.train.optimizers import Optimizers
from dadt.train.ranks import Ranks
from dadt.train.replicas import checksum
from dadt.train.stand_in import name_of

_version = attrgetter("_version")
_VALUES = 16


class LastStepWeights:
    """Record of one optimizer's weights right after its last step."""

    def __init__(self) -> None:
        self.step = 0
        self.parameters: list[torch.Tensor] = []
        """The trained parameters, as the same list object while they do not change."""
        self.versions: list[int] = []
        self.copies: dict[int, tuple[int, torch.Tensor]] = {}
        """Copies by the parameter's index: the step of the copy, and the parameter's first values after that step."""
        self.last = 0
        """Index of the parameter copied in the last step."""

    def step_ends(self, attachment: Attachment) -> None:
        self.step, parameters = attachment.step, attachment.parameters
        if parameters is not self.parameters:
            self.parameters = parameters
            self.copies.clear()
        self.versions = list(map(_version, parameters))
        if parameters:
            self.last = self.step % len(parameters)
            if is_dense(parameters[self.last]):
                self.copies[self.last] = self.step, some_values(parameters[self.last], _VALUES).clone()

    def told(self) -> dict[str, Any]:
        """Return this rank's checksums and copies of the weights, in plain values to send to other ranks."""
        is_other = self._was_replaced()
        sums = [
            None if is_other or p._version != version or not is_dense(p) else _sum(p)
            for p, version in zip(self.parameters, self.versions, strict=True)
        ]
        copies = [[at, step, of_values(copy)] for at, (step, copy) in self.copies.items()]
        return {"step": self.step, "sums": sums, "copies": copies}

    def _was_replaced(self) -> bool:
        """Whether the script has changed values since the last step without a new autograd version, for example by
        `.data`."""
        step, before = self.copies.get(self.last, (0, None))
        if before is None or step != self.step:
            return False
        now = some_values(self.parameters[self.last], _VALUES)
        return before.dtype != now.dtype or of_values(before) != of_values(now)


class FinalWeights:
    """Compares the final weights of all optimizers whose algorithm keeps all ranks' replicas identical."""

    def __init__(self, ranks: Ranks, optimizers: Optimizers, attachments: Attachments) -> None:
        self._ranks, self._optimizers, self._attachments = ranks, optimizers, attachments
        self._noted: WeakKeyDictionary[Attachment, LastStepWeights] = WeakKeyDictionary()

    def stepped(self, attachment: Attachment) -> None:
        """Record the weights after a step. Called while the parameters contain true weights and not predicted ones."""
        if attachment.algorithm.identical:
            if (noted := self._noted.get(attachment)) is None:
                noted = self._noted[attachment] = LastStepWeights()
            noted.step_ends(attachment)

    def tell(self) -> bytes:
        """Return this rank's encoded report of its weights at the end; empty if ranks may have different weights."""
        config = self._ranks.config
        if not config.broadcast or config.executor == "null":
            return b""
        told = {a.index: n.told() for a, n in self._noted.items() if a.alive and a.algorithm.identical}
        return json.dumps(told).encode()

    def compare(self, lanes: Sequence[bytes]) -> None:
        """Compare the ranks' reports of their weights. lanes: each rank's report, by its index in the group. Raises
        WeightsDiffer if weights differ."""
        if not lanes or not all(lanes):
            return
        every = [json.loads(bytes(lane)) for lane in lanes]
        for attachment in self._attachments:
            each = [told.get(str(attachment.index)) for told in every]
            if None not in each and len({told["step"] for told in each}) == 1:
                self._judge(attachment, each)

    def _judge(self, attachment: Attachment, each: Sequence[dict[str, Any]]) -> None:
        """Raise WeightsDiffer if this optimizer's weights differ between ranks."""
        if len({len(told["sums"]) for told in each}) > 1:
            return
        by_place = dict[int, list[Any]]()
        for told in each:
            for at, step, crc in told["copies"]:
                by_place.setdefault(at, []).append((step, crc))
        for at, sums in enumerate(zip(*(told["sums"] for told in each), strict=True)):
            copies = by_place.get(at, [])
            comparable = len(copies) == len(each) and len({step for step, _ in copies}) == 1
            for values in (sums, copies if comparable else ()):
                if None not in values and len(set(values)) > 1:
                    raise WeightsDiffer(self._sentence(attachment, at, values))

    def _sentence(self, attachment: Attachment, at: int, values: Sequence[Any]) -> str:
        members = self._ranks.members
        others = [str(rank) for rank, value in zip(members, values, strict=True) if value != values[0]]
        parameter = self._noted[attachment].parameters[at]
        name = self._optimizers.parameter_names().get(id(parameter), f"parameter {at}")
        ranks = f"rank{'s' * (len(others) > 1)} {' and '.join(filter(None, (', '.join(others[:-1]), others[-1])))}"
        return (
            f"the ranks' weights differ at the end: those that {name_of(attachment.optimizer)}{attachment.name}"
            f" trains, first in {name}, on {ranks} from those on rank {members[0]}. Likely causes: random numbers that"
            " a step or the script adds to weights, weights set from a rank's own batch or anew after training began,"
            " or a change made on one rank alone. --verify-every 10 says from which step on, and makes them equal"
        )


def _sum(parameter: torch.Tensor) -> int | None:
    """Return the parameter's checksum, or None if it is not finite, because bits of NaN may differ between ranks whose
    values are equal."""
    value = local(parameter).detach()
    value = torch.view_as_real(value) if value.is_complex() else value
    if not bool(torch.isfinite(value.sum(dtype=torch.float64))):
        return None
    return checksum(parameter)
