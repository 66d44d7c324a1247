"""What goes wrong between ranks that exchange named tensors. Each fault is one class, with a line in `draw_fault`."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from simulation.comm_negotiation import NegotiationJob
    from simulation.comm_rank import NamedRank
    from simulation.comm_scenario import NamedTensor

SILENT_SECONDS = 40.0
"""Seconds after which a connection over which nothing is acknowledged ends (TCP_USER_TIMEOUT in link.cc), and
some more."""
_FRAME = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class NamedFault(ABC):
    """Something that happens to one rank at a time, or in a round of it."""

    at: float
    rank: int
    round: int
    seconds: ClassVar[float] = 0.0
    """How much longer the job may take for it."""
    fatal: ClassVar[bool] = True
    """Whether it may end the exchanges of all ranks, and not only those of a tensor."""

    def strike(self, job: NegotiationJob) -> bool:
        """Do it, at its time. Returns whether it has any effect."""
        return False

    def submits(self, tensors: list[NamedTensor], random: Random) -> list[NamedTensor]:
        """What the rank submits in the round of this fault, in place of these."""
        return tensors


class _Strikes(NamedFault):
    """Strikes a rank that has not ended."""

    __slots__ = ()

    def strike(self, job: NegotiationJob) -> bool:
        rank = job.ranks[self.rank]
        if not rank.process.alive or rank.over:
            return False
        return self.hit(job, rank)

    @abstractmethod
    def hit(self, job: NegotiationJob, rank: NamedRank) -> bool: ...


class RankDies(_Strikes):
    """The rank's process is killed; its connections end."""

    __slots__ = ()

    def hit(self, job: NegotiationJob, rank: NamedRank) -> bool:
        rank.die(silent=False)
        return True


class Vanishes(_Strikes):
    """The rank's machine has no power any more: nobody hears of it."""

    __slots__ = ()
    seconds = SILENT_SECONDS

    def hit(self, job: NegotiationJob, rank: NamedRank) -> bool:
        rank.die(silent=True)
        return True


class Sleeps(_Strikes):
    """The rank's process is stopped for a while."""

    __slots__ = ()
    seconds = 30.0

    def hit(self, job: NegotiationJob, rank: NamedRank) -> bool:
        rank.process.stop()
        job.world.after(job.world.spread(5.0) * job.world.random.choice([0.1, 1.0, 4.0]), rank.go_on)
        return True


class IsSlow(_Strikes):
    """All that the rank sends and gets takes longer."""

    __slots__ = ()
    seconds = 30.0
    fatal = True

    def hit(self, job: NegotiationJob, rank: NamedRank) -> bool:
        slow = job.world.random.choice([0.1, 1.0, 4.0])
        for wire in rank.wires:
            wire.link.slow += slow
        return bool(rank.wires)


class IsCut(_Strikes):
    """A connection carries nothing for a while."""

    __slots__ = ()
    seconds = 30.0

    def hit(self, job: NegotiationJob, rank: NamedRank) -> bool:
        wires = list(rank.wires)
        if not wires:
            return False
        wire = job.world.random.choice(wires)
        wire.link.cut()
        job.world.after(job.world.spread(6.0), wire.link.mend)
        return True


class Aborts(_Strikes):
    """The rank's script fails on its own."""

    __slots__ = ()

    def hit(self, job: NegotiationJob, rank: NamedRank) -> bool:
        rank.fail(f"rank {rank.rank} failed")
        return True


class EngineFails(_Strikes):
    """The data connection of the rank fails."""

    __slots__ = ()

    def hit(self, job: NegotiationJob, rank: NamedRank) -> bool:
        job.engines.engines[rank.rank].abort(f"the library of rank {rank.rank} failed")
        rank.poke()
        return True


@dataclass(frozen=True, slots=True)
class SendsNonsense(NamedFault):
    """The rank is broken: it sends what it should not."""

    how: str = "random"

    def strike(self, job: NegotiationJob) -> bool:
        rank, random = job.ranks[self.rank], job.world.random
        wires = [wire for wire in rank.own_wires if wire.link.open]
        if not rank.process.alive or rank.over or not wires:
            return False
        wire = random.choice(wires)
        sent = wire.sent
        if self.how in ("doubled", "older", "cut short", "truncated") and not sent:
            return False
        if self.how == "doubled":
            wire.put(sent[-1])
        elif self.how == "older":
            wire.put(sent[0])
        elif self.how == "cut short":
            wire.put(sent[-1][: len(sent[-1]) // 2])
        elif self.how == "truncated":
            body = sent[-1][4 : 4 + max(1, len(sent[-1]) // 2)]
            wire.put(_FRAME.pack(len(body)) + body)
        elif self.how == "huge":
            wire.put(_FRAME.pack(random.choice([0, 1 << 30, (1 << 30) + 1, (1 << 32) - 1])) + b"\1")
        elif self.how == "foreign":  # a message that only the other side may send
            kind = bytes([1 if self.rank == 0 else random.choice([2, 5])])
            body = bytes(random.choice([[0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 97, 0, 0, 0, 0]]))
            wire.put(_FRAME.pack(len(body) + 1) + kind + body)
        elif self.how == "leaves twice":
            wire.put(2 * (_FRAME.pack(1) + b"\4"))
        else:
            wire.put(random.randbytes(random.choice([1, 5, 40, 100_000])))
        return True


NONSENSE = ("doubled", "older", "cut short", "truncated", "huge", "foreign", "leaves twice", "random")


@dataclass(frozen=True, slots=True)
class Differs(NamedFault):
    """The rank submits another tensor than the others under one name."""

    how: str = "count"
    fatal: ClassVar[bool] = False

    def submits(self, tensors: list[NamedTensor], random: Random) -> list[NamedTensor]:
        place = random.randrange(len(tensors))
        if self.how == "group size" and tensors[place].group:
            return _grown(tensors, tensors[place].group)
        tensors[place] = _changed(tensors[place], self.how)
        return tensors


DIFFERENCES = ("count", "dtype", "reduction", "kind", "root", "group size")


def _changed(tensor: NamedTensor, how: str) -> NamedTensor:
    only = {"root": "broadcast", "reduction": "allreduce"}
    if how == "count" or only.get(how, tensor.kind) != tensor.kind:
        return replace(tensor, count=tensor.count + 1)
    if how == "dtype":
        return replace(tensor, dtype="float64")
    if how == "reduction":
        return replace(tensor, reduction="min")
    if how == "kind":
        return replace(tensor, kind="broadcast" if tensor.kind == "allreduce" else "allreduce")
    if how == "root":
        return replace(tensor, root=1)
    return replace(tensor, group="alone", group_size=1)


def _grown(tensors: list[NamedTensor], group: str) -> list[NamedTensor]:
    """The rank's group has one tensor more. A script submits a group as a whole: all state its size, and the number of
    a tensor is its name."""
    of_group = [replace(each, group_size=each.group_size + 1) for each in tensors if each.group == group]
    last = replace(of_group[0], name=f"{group}.{len(of_group)}")
    return [*of_group, last, *(each for each in tensors if each.group != group)]


class Lacks(NamedFault):
    """The rank does not submit one of the tensors."""

    __slots__ = ()

    def submits(self, tensors: list[NamedTensor], random: Random) -> list[NamedTensor]:
        del tensors[random.randrange(len(tensors))]
        return tensors


class Adds(NamedFault):
    """The rank submits a tensor that the others do not have, or have under another name."""

    __slots__ = ()

    def submits(self, tensors: list[NamedTensor], random: Random) -> list[NamedTensor]:
        place = random.randrange(len(tensors))
        name, names = f"{tensors[place].name} of rank {self.rank}", {each.name for each in tensors}
        while name in names:
            name += " again"
        other = replace(tensors[place], name=name)
        return [*tensors, other] if random.random() < 0.5 else [*tensors[:place], other, *tensors[place + 1 :]]


class EndsEarly(NamedFault):
    """The rank shuts down in the midst of the rounds."""

    __slots__ = ()


def draw_fault(random: Random, at: float, size: int, rounds: int) -> NamedFault:
    rank, number = random.randrange(size), random.randrange(rounds)
    kinds = [
        RankDies,
        Vanishes,
        Sleeps,
        IsSlow,
        IsCut,
        Aborts,
        EngineFails,
        SendsNonsense,
        Differs,
        Lacks,
        Adds,
        EndsEarly,
    ]
    kind = random.choices(kinds, [3, 1, 3, 2, 2, 1, 1, 3, 4, 1, 1, 1])[0]
    if kind is SendsNonsense:
        return SendsNonsense(at, rank, number, random.choice(NONSENSE))
    if kind is Differs:
        return Differs(at, rank, number, random.choice(DIFFERENCES))
    return kind(at, rank, number)
