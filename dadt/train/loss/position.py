"""Decides how ranks that have connected again train on: which ranks are behind, which rank sends its weights to them,
and whether any rank cannot catch up. All ranks decide alike, as each has the reports of all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from dadt.errors import Mismatch


@dataclass(frozen=True, slots=True)
class Position:
    """One rank's report of how far it has trained, which it sends to all other ranks after ranks were lost."""

    averaged: Sequence[int]
    """For each managed optimizer, the number of steps whose gradients are averaged; -1 if it does not have the first
    rank's state yet."""
    consumed: Sequence[bool]
    """For each managed optimizer, whether gradients are averaged but the optimizer has not stepped yet."""
    rounds: Sequence[dict[str, list[int]]]
    """For each managed optimizer, how far the rank is in exchanges that belong to no step, such as the weight averages
    of algorithm `local`."""
    gathered: int
    """Number of small allgathers that are complete on this rank before the first incomplete one."""
    repeatable: bool
    """Whether all exchanges under way can be launched again."""
    stuck: str
    """Reason why the rank cannot continue; empty if it can."""
    joins: bool
    """Whether the rank is new and has trained nothing yet."""
    given: int = 0
    """Number of managed optimizers whose state the rank received when it joined. The rank will start from that state
    with optimizers that `averaged` does not contain yet."""
    replicas: Sequence[Sequence[int]] = ()
    """For each managed optimizer, the checksums of the rank's replica; empty if replicas need not be equal."""


class CatchUp(NamedTuple):
    """The ranks that lack one optimizer's newest average, and the rank that sends them its weights and optimizer state.
    Ranks are indices in the group."""

    optimizer: int
    root: int
    behind: Collection[int]


@dataclass(frozen=True, slots=True)
class Course:
    """Decision how the ranks of a new group train on. Ranks are indices in the group."""

    furthest: Sequence[int]
    """For each managed optimizer, the number of steps that the furthest rank has averaged."""
    catch_ups: Sequence[CatchUp]
    greeter: int | None
    """The rank that sends the state of its training to new ranks; None if no rank is new, or no rank has trained."""
    repeats: bool
    """Whether exchanges of earlier steps can be launched again on all ranks."""
    gathered: int
    """Number of small allgathers that are complete on any rank."""
    least: int
    """The smallest number of small allgathers that are complete on a rank that is not new."""
    informant: int
    """The rank that sends results of small allgathers to the ranks that lack them."""
    level: bool
    """Whether all ranks are equally far, so that no rank takes anything from another one."""


def _averaged(position: Position, optimizer: int, furthest: int) -> int:
    if optimizer < len(position.averaged):
        return position.averaged[optimizer]
    return furthest if position.joins or optimizer < position.given else -1


def _far(position: Position) -> tuple[object, ...]:
    return position.averaged, position.rounds, position.gathered


def decide(told: Sequence[Position], members: Sequence[int]) -> Course:
    """Decide how ranks train on. told: each rank's report, in the order of the group. members: each rank's number in
    the whole job. Raises Mismatch if training cannot continue."""
    for rank, position in zip(members, told, strict=True):
        if position.stuck:
            raise Mismatch(f"training cannot go on after ranks have connected anew: rank {rank} was {position.stuck}")
    furthest = [max(each) for each in zip_longest(*(position.averaged for position in told), fillvalue=-1)]
    catch_ups = []
    for index, averaged in enumerate(furthest):
        theirs = [_averaged(p, index, averaged) for p in told]
        if (least := min(theirs)) < averaged:
            root = theirs.index(averaged)
            if averaged - least > 1 or told[root].consumed[index]:
                late = members[theirs.index(least)]
                raise Mismatch(f"training cannot go on after ranks have connected anew: rank {late} cannot catch up")
            catch_ups.append(CatchUp(index, root, {rank for rank, each in enumerate(theirs) if each < averaged}))
    welcomes = any(position.joins for position in told)
    gathered = max(position.gathered for position in told)
    return Course(
        furthest,
        catch_ups,
        greeter=next((rank for rank, p in enumerate(told) if p.averaged), None) if welcomes else None,
        repeats=all(position.repeatable for position in told),
        gathered=gathered,
        least=min((position.gathered for position in told if not position.joins), default=gathered),
        informant=[position.gathered for position in told].index(gathered),
        level=not any(p.joins or _far(p) != _far(told[0]) for p in told),
    )
