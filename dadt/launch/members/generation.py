"""Builds the frame that tells all ranks that a new generation begins, that is, which ranks are in the job from now on,
and which of these write files."""

from __future__ import annotations

from collections.abc import Sequence

from dadt.control import schema, shared_folder
from dadt.control.frame import Frame
from dadt.launch.hosts.slot import Slot
from dadt.launch.members.node import Node
from dadt.launch.members.rendezvous import Rendezvous


def regroup(rendezvous: Rendezvous, slots: Sequence[Slot], nodes: Sequence[Node], handed: int, why: str) -> Frame:
    """Return the frame that announces the current generation to all agents. New workers write no files as long as ranks
    that began the job are left.

    handed: number of the latest generation that began because a new worker joined for which the other ranks had waited.
    why: text that says why the new generation begins.
    """
    present = rendezvous.present
    places = {member.rank: slots[member.rank].cross_rank for member in present}
    firsts: dict[int, int] = {}
    for member in present:
        if not member.joined or all(each.joined for each in present):
            firsts.setdefault(places[member.rank], member.rank)
    facts: dict[str, object] = {
        "generation": rendezvous.generation,
        "members": list(places),
        "firsts": list(firsts.values()),
        "text": why[: schema.TEXT],
        "handed": handed,
    }
    seen = {rank: (place, nodes[place].folder) for rank, place in places.items()}
    if writers := shared_folder.writers(seen, firsts.values()):
        facts["writers"] = [writers.get(rank, -1) for rank in places]
    return Frame("regroup", facts)
