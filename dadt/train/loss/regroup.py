"""Continues training after ranks were lost or a connection has failed: the remaining ranks reconnect, find out how far
each of them is, and train on from the furthest.

Every rank waits for every exchange, so no rank is more than one step ahead of another. Ranks that lack the newest
average load weights and state from a rank that has applied it, and apply nothing in their current step. Exchanges under
way are launched again with their original gradients. The module `position` decides all this from the reports of all
ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch

from dadt.comm import plain
from dadt.errors import Mismatch
from dadt.train.algorithm import Relaunched
from dadt.train.attachment import Attachment
from dadt.train.attachments import Attachments
from dadt.train.exchange.exchange import Exchange
from dadt.train.loss.gathering import Gathering
from dadt.train.loss.position import Course, Position, decide
from dadt.train.ranks import Ranks
from dadt.train.replicas import Replicas
from dadt.train.verification import Verification, judge

_TAG = 90
"""Tag of messages to new ranks; the algorithms use larger tags."""


def regroup(
    ranks: Ranks, attachments: Attachments, replicas: Replicas, verification: Verification, *, equal: bool
) -> None:
    """Continue training with the ranks that are connected now. equal: whether all ranks have equal weights, or equal
    anchors (last averaged weights), after each exchange. Raises Mismatch if training cannot continue."""
    for a in attachments:
        a.prediction.undo()
    # Optimizers that will start from the state that this rank received when it joined are left out, because they are
    # not behind.
    started = [a for a in attachments if a.lockstep.averaged >= 0 or a.index >= len(replicas.given)]
    mine = _mine(ranks, started, given=len(replicas.given))
    if equal:
        mine = replace(mine, replicas=[verification.checksums(a) if a.lockstep.averaged >= 0 else [] for a in started])
    lanes = ranks.tell("position", json.dumps(asdict(mine)).encode())
    told = [Position(**json.loads(lane)) for lane in lanes]
    course = decide(told, ranks.members)
    if course.greeter is not None and not equal:
        _welcome(ranks, replicas, told, course.greeter)
    for index, root, behind in course.catch_ups:
        late, is_behind = list(attachments)[index], ranks.group.rank in behind
        if is_behind:
            verification.forget(late)
        replicas.catch_up(late, root, behind=is_behind)
    again = _settle(ranks, course, joins=mine.joins)
    for a, averaged in zip(started, course.furthest, strict=False):
        if (exchange := a.lockstep.regroup(averaged, course.repeats)) is not None:
            again.append(exchange)
    for index, a in enumerate(started):
        again += a.algorithm.follow([p.rounds[index] if index < len(p.rounds) else {} for p in told])
    if equal:
        # Ranks that are equally far have told their checksums with their positions.
        every = [p.replicas for p in told] if course.level else None
        _compare(ranks, started, verification, every)
    for each in sorted(again, key=lambda each: each.began):
        if isinstance(each, Gathering):
            each.launch(ranks.engine)
        else:
            ranks.keep(each)
            each.repeat()


def _mine(ranks: Ranks, attachments: Sequence[Attachment], given: int) -> Position:
    pending = [a.algorithm.pending for a in attachments]
    return Position(
        averaged=[a.lockstep.averaged for a in attachments],
        consumed=[a.consumed and a.algorithm.averages for a in attachments],
        rounds=[a.algorithm.rounds() for a in attachments],
        gathered=ranks.gatherings.completed,
        repeatable=all(each.repeatable for each in pending if isinstance(each, Exchange)),
        stuck=_stuck(ranks, attachments),
        joins=ranks.world.joins and not attachments,
        given=given,
    )


def _welcome(ranks: Ranks, replicas: Replicas, told: Sequence[Position], root: int) -> None:
    """Send the training state from the rank `root` to all new ranks, except for untrained values that they already
    have."""
    gives, joins = ranks.group.rank == root, told[ranks.group.rank].joins
    mine = plain.encode(replicas.known() if joins else None, "what a new rank has")
    every = [plain.decode(lane) for lane in ranks.tell("known", mine)]
    state = replicas.give([each for each in every if each is not None]) if gives else b""
    length = int.from_bytes(ranks.tell("welcome", len(state).to_bytes(8, "little"))[root], "little")
    works = []
    if gives:
        given = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        works = [ranks.mail.send(given, rank, _TAG) for rank, position in enumerate(told) if position.joins]
    elif joins:
        given = torch.empty(length, dtype=torch.uint8, device="cpu")
        works = [ranks.mail.receive(given, root, _TAG)]
    for work in works:
        ranks.await_message(work, "giving the state to new workers")
    if works and not gives:
        replicas.given = plain.decode(given.numpy().tobytes())


def _stuck(ranks: Ranks, attachments: Sequence[Attachment]) -> str:
    for a in attachments:
        if not a.algorithm.survives:
            return f"in algorithm {ranks.config.algorithm}"
        if a.lockstep.stuck:
            return f"in step {a.step}{a.name}, in the midst of what all ranks had agreed on"
    return ""


def _settle(ranks: Ranks, course: Course, *, joins: bool) -> list[Gathering | Relaunched]:
    """Complete allgathers that some ranks have completed, by sending their results to the other ranks. joins: whether
    this rank is new. Returns the operations to launch again."""
    if joins:
        ranks.gatherings.count = course.gathered
    if course.least < course.gathered:
        known = ranks.gatherings.results(course.least) if ranks.group.rank == course.informant else {}
        every = ranks.tell("gathered", plain.encode(known, "what was gathered"))
        ranks.gatherings.settle(plain.decode(every[course.informant]), course.gathered)
    ranks.gatherings.undo(math.inf if ranks.transaction is None else ranks.transaction)
    return [g for g in ranks.gatherings.newest if not g.complete]


def _compare(
    ranks: Ranks,
    attachments: Sequence[Attachment],
    verification: Verification,
    told: Sequence[Sequence[Sequence[int]]] | None,
) -> None:
    """Raise Mismatch if ranks have different replicas; with `--verify-every`, make the replicas equal instead. told:
    each rank's checksums of its replica of each optimizer; None if they may have changed since ranks told them."""
    for index, a in enumerate(attachments):
        if a.lockstep.averaged < 0:
            continue
        every = verification.compare(a) if told is None else [replicas[index] for replicas in told]
        if ranks.config.verify_every:
            verification.repair(a, every)
        elif wrong := judge(every).wrong:
            rank = ranks.members[wrong[0]]
            raise Mismatch(
                f"training cannot go on after ranks have connected anew: the weights of rank {rank} differ from those"
                f" of the others{a.name}"
            )
