"""Deliberate faults in the decisions of the launcher, each of which simulated jobs have to find."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from dadt.launch.contact import Contact
from dadt.launch.ending import cause as cause_module
from dadt.launch.ending.cause import Cause
from dadt.launch.ending.endings import Endings
from dadt.launch.ending.termination import Termination
from dadt.launch.members.membership import Membership
from dadt.launch.members.rendezvous import Rendezvous
from dadt.launch.members.replacement import Replacements
from dadt.launch.members.silence import Silences
from dadt.launch.members.waits import Waiting

MOST_SEEDS = 5000


def nothing(*_: Any, **__: Any) -> None:
    """Stands for a method that is forgotten."""


def first_told(endings: Any, records: Any, left: Any = ()) -> Any:
    """Blames whoever is reported first."""
    first = next((ending for ending in endings if ending.code), None)
    return None if first is None else (first, records.get(first.rank))


def stays(self: Rendezvous, lost: Any, text: str, now: float) -> None:
    self._begin_anew(text, now)


def deaf(self: Contact, node: Any, frame: Any, epoch: float) -> str:
    told = hear(self, node, frame, epoch)
    node.clock = 0.0
    return told


hear = Contact.hear


def once(self: Membership, *given: Any, **named: Any) -> bool:
    """Loses the first ranks that are lost, and none after them."""
    if self._rendezvous.generation:
        return True
    return lose(self, *given, **named)


lose = Membership.lose


MUTATIONS: Mapping[str, tuple[Any, str, Any]] = {
    "an agent that is silent is never given up": (Contact, "silent", lambda self, now: []),
    "what an agent says is not checked": (Contact, "hear", lambda self, node, frame, epoch: ""),
    "clocks of hosts are taken for the same": (Contact, "hear", deaf),
    "ranks that are left learn nothing of a loss": (Membership, "_tell", nothing),
    "only the first loss counts": (Membership, "lose", once),
    "a lost rank stays a member": (Rendezvous, "regroup", stays),
    "a question of an older generation is answered": (Rendezvous, "_is_outdated", lambda self, question: False),
    "whoever waits is not refused when ranks are lost": (Rendezvous, "refuse", nothing),
    "whoever is reported first is blamed": (cause_module, "find_cause", first_told),
    "ranks without which others train on are blamed": (Cause, "excuse", nothing),
    "whoever has waited is blamed": (Cause, "_is_consequence", lambda self, ending, record: False),
    "a rank that could not go on is no cause": (Cause, "hold", nothing),
    "agents may take for ever to end": (Termination, "turn", lambda self, now: turn(self, now) and False),
    "a failure ends nobody": (Termination, "fail_by", nothing),
    "the user's signal ends nobody": (Termination, "end", lambda self, number, who, now: 0.0),
    "ranks for which all wait are never given up": (Membership, "_give_up_silent", nothing),
    "a rank that left early is not lost": (Membership, "_lose_left", nothing),
    "a connection that has failed is not made again": (Membership, "_connect_anew", nothing),
    "a rank that asks to connect again gets no answer": (Membership, "_answer_all", nothing),
    "no rank counts as waiting": (Waiting, "lasts", lambda self, seen, now: False),
    "hosts that do not hear each other are not known": (Silences, "silent", nothing),
    "a rank that was lost is never started again": (Replacements, "turn", nothing),
    "a lost host does not end the job": (Endings, "lose", lambda self, node, text, now, at=0.0: None),
    "a rank that failed is not reported": (Endings, "failed", nothing),
}
"""Each fault by what it is: what it replaces, and by what."""

turn = Termination.turn


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """The launcher decides with this fault."""
    where, what, other = MUTATIONS[name]
    with patch.object(where, what, other):
        yield
