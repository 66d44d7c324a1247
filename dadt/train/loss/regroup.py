"""Continues training after ranks were lost or a connection has failed: the remaining ranks reconnect, find out how far
each of them is, and train on from the furthest.

Every rank waits for every exchange, so no rank is more than one step ahead of another. Ranks without the newest average
load weights and state from a rank that has it, and apply nothing in their current step. Exchanges under way are
launched again with their original gradients. All decisions follow from what each rank reports of itself, so all ranks
decide alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest

import torch

from dadt.comm import plain
from dadt.errors import Mismatch
from dadt.train.algorithm import Relaunched
from dadt.train.attachments import Attachments
from dadt.train.exchange.exchange import Exchange
from dadt.train.loss.gathering import Gathering
from dadt.train.ranks import Ranks
from dadt.train.replicas import Replicas
from dadt.train.verification import Verification, judge

_TAG = 90
"""Tag of messages to new ranks; the algorithms use larger tags."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far one rank has trained, as it reports to all others after ranks were lost."""

    averaged: Sequence[int]
    """For each managed optimizer, the number of steps whose gradients are averaged; -1 if it does not have the first
    rank's state yet."""
    consumed: Sequence[bool]
    """For each managed optimizer, whether gradients are averaged but the optimizer has not stepped yet."""
    rounds: Sequence[dict[str, list[int]]]
    """For each managed optimizer, how far the rank is in exchanges that belong to no step, such as the weight averages
    of algorithm `local`."""
    gathered: int
    """Number of small allgathers that are complete on this rank, counted up to the first incomplete one."""
    repeatable: bool
    """Whether all exchanges under way can be launched again."""
    stuck: str
    """Reason why the rank cannot continue; empty if it can."""
    joins: bool
    """Whether the rank is new and has trained nothing yet."""


def regroup(
    ranks: Ranks, attachments: Attachments, replicas: Replicas, verification: Verification, *, equal: bool
) -> None:
    """Continue training with the ranks that are connected now. equal: whether all ranks have equal weights, or equal
    anchors (last averaged weights), after each exchange. Raises Mismatch if training cannot continue."""
    for a in attachments:
        a.prediction.undo()
    mine = json.dumps(asdict(_mine(ranks, attachments))).encode()
    told = [Position(**json.loads(lane)) for lane in ranks.tell("position", mine)]
    for rank, position in zip(ranks.members, told, strict=True):
        if position.stuck:
            raise Mismatch(f"training cannot go on after ranks have connected anew: rank {rank} was {position.stuck}")
    if any(position.joins for position in told) and not equal:
        _welcome(ranks, replicas, told)
    furthest = [max(each) for each in zip_longest(*(p.averaged for p in told), fillvalue=-1)]
    for index, averaged in enumerate(furthest):
        theirs = [p.averaged[index] if index < len(p.averaged) else averaged if p.joins else -1 for p in told]
        if min(theirs) < averaged:
            root = theirs.index(averaged)
            if averaged - min(theirs) > 1 or told[root].consumed[index]:
                late = ranks.members[theirs.index(min(theirs))]
                raise Mismatch(f"training cannot go on after ranks have connected anew: rank {late} cannot catch up")
            behind = theirs[ranks.group.rank] < averaged
            replicas.catch_up(list(attachments)[index], root, behind=behind)
    again = _settle(ranks, told)
    keep = all(position.repeatable for position in told)
    for a, averaged in zip(attachments, furthest, strict=False):
        if (exchange := a.lockstep.regroup(averaged, keep)) is not None:
            again.append(exchange)
    for index, a in enumerate(attachments):
        again += a.algorithm.follow([p.rounds[index] if index < len(p.rounds) else {} for p in told])
    if equal:
        _compare(ranks, attachments, verification)
    for each in sorted(again, key=lambda each: each.began):
        if isinstance(each, Gathering):
            each.launch(ranks.engine)
        else:
            ranks.keep(each)
            each.repeat()


def _mine(ranks: Ranks, attachments: Attachments) -> Position:
    pending = [a.algorithm.pending for a in attachments]
    unfinished = [g.number for g in ranks.gatherings.newest if not g.complete]
    return Position(
        averaged=[a.lockstep.averaged for a in attachments],
        consumed=[a.consumed and a.algorithm.averages for a in attachments],
        rounds=[a.algorithm.rounds() for a in attachments],
        gathered=min(unfinished, default=ranks.gatherings.count),
        repeatable=all(each.repeatable for each in pending if isinstance(each, Exchange)),
        stuck=_stuck(ranks, attachments),
        joins=ranks.world.joins and not attachments,
    )


def _welcome(ranks: Ranks, replicas: Replicas, told: Sequence[Position]) -> None:
    """Send the full training state from the first rank that has trained to all new ranks."""
    root = next((rank for rank, position in enumerate(told) if position.averaged), None)
    if root is None:
        return
    gives = ranks.group.rank == root
    state = replicas.give() if gives else b""
    length = int.from_bytes(ranks.tell("welcome", len(state).to_bytes(8, "little"))[root], "little")
    works = []
    if gives:
        given = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        works = [ranks.mail.send(given, rank, _TAG) for rank, position in enumerate(told) if position.joins]
    elif told[ranks.group.rank].joins:
        given = torch.empty(length, dtype=torch.uint8, device="cpu")
        works = [ranks.mail.receive(given, root, _TAG)]
    for work in works:
        ranks.await_message(work, "giving the state to new workers")
    if works and not gives:
        replicas.given = plain.decode(given.numpy().tobytes())


def _stuck(ranks: Ranks, attachments: Attachments) -> str:
    for a in attachments:
        if not a.algorithm.survives:
            return f"in algorithm {ranks.config.algorithm}"
        if a.lockstep.stuck:
            return f"in step {a.step}{a.name}, in the midst of what all ranks had agreed on"
    return ""


def _settle(ranks: Ranks, told: Sequence[Position]) -> list[Gathering | Relaunched]:
    """Complete allgathers that some ranks have completed, by sending their results to the other ranks. Returns the
    operations to launch again."""
    most = max(p.gathered for p in told)
    least = min((p.gathered for p in told if not p.joins), default=most)
    if told[ranks.group.rank].joins:
        ranks.gatherings.count = most
    if least < most:
        mine = {g.number: list(g.lanes) for g in ranks.gatherings.newest if g.complete and g.number >= least}
        given = mine if told[ranks.group.rank].gathered == most else {}
        every = ranks.tell("gathered", plain.encode(given, "what was gathered"))
        known = plain.decode(every[[p.gathered for p in told].index(most)])
        for gathering in ranks.gatherings.newest:
            if not gathering.complete and gathering.number < most:
                gathering.settle(known[gathering.number])
    if ranks.transaction is not None:
        ranks.gatherings.undo(ranks.transaction)
    return [g for g in ranks.gatherings.newest if not g.complete]


def _compare(ranks: Ranks, attachments: Attachments, verification: Verification) -> None:
    """Raises Mismatch if ranks have different replicas; with `--verify-every`, makes them equal instead."""
    for a in attachments:
        if a.lockstep.averaged < 0:
            continue
        every = verification.compare(a)
        if ranks.config.verify_every:
            verification.repair(a, every)
        elif wrong := judge(every).wrong:
            rank = ranks.members[wrong[0]]
            raise Mismatch(
                f"training cannot go on after ranks have connected anew: the weights of rank {rank} differ from those"
                f" of the others{a.name}"
            )
