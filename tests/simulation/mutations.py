"""Deliberate faults in the decisions of the launcher and of its agents, each of which simulated jobs have to find."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dadt.launch.agent.host_job import HostJob
from dadt.launch.agent.launcher_contact import LauncherContact
from dadt.launch.agent.other_hosts import OtherHosts
from dadt.launch.agent.registry import WorkerRegistry
from dadt.launch.agent.shims import Shims
from dadt.launch.agent.stop import Stop
from dadt.launch.contact import Contact
from dadt.launch.ending import cause as cause_module
from dadt.launch.ending.cause import Cause
from dadt.launch.ending.endings import Endings
from dadt.launch.ending.termination import Termination
from dadt.launch.members.joining import Joining
from dadt.launch.members.membership import Membership
from dadt.launch.members.rendezvous import Rendezvous
from dadt.launch.members.replacement import Replacements
from dadt.launch.members.silence import Silences
from dadt.launch.members.waits import Waiting


def nothing(*_: Any, **__: Any) -> None:
    """Stands for a method that is forgotten."""


def never(*_: Any, **__: Any) -> bool:
    """Stands for a question that is always denied."""
    return False


def first_told(endings: Any, records: Any, left: Any = ()) -> Any:
    """Blames whoever is reported first."""
    first = next((ending for ending in endings if ending.code), None)
    return None if first is None else (first, records.get(first.rank))


def stays(self: Rendezvous, lost: Any, text: str, now: float) -> None:
    self._begin_anew(text, now)


def deaf(self: Contact, node: Any, frame: Any, uptime: float) -> str:
    told = hear(self, node, frame, uptime)
    node.clock = 0.0
    return told


def once(self: Membership, *given: Any, **named: Any) -> bool:
    """Loses the first ranks that are lost, and none after them."""
    if self._rendezvous.generation:
        return True
    return lose(self, *given, **named)


def patient(self: Rendezvous, key: str, rank: int, blob: bytes, timeout: float, *more: Any) -> None:
    give(self, key, rank, blob, 10 * timeout, *more)


def unfinished(self: Rendezvous, event: Any) -> None:
    ending(self, event)
    self.members[event.frame["rank"]].finished = False


def still_cut(self: Silences, event: Any) -> None:
    known = dict(self._outages)
    heard(self, event)
    self._outages = known


def sleepless(self: LauncherContact, now: float) -> bool:
    return now - self._heard > self.patience


def blind(self: HostJob, now: float, steps: Any, *, launcher_gone: bool) -> None:
    host_turn(self, now, steps, launcher_gone=False)


def gentle(self: Stop, left: Any, now: float) -> None:
    """Waits for ever for workers that do not heed SIGTERM."""
    if self.signalled and left:
        return
    advance(self, left, now)


def to_all(self: HostJob, order: Any, now: float) -> None:
    order.header.pop("rank", None)
    signal(self, order, now)


def stopped(self: HostJob, rank: int, code: int, facts: Any) -> None:
    before, self.stop = self.stop, Stop(0.0, 0.0, self.outbox, 0.0)
    self.stop.signalled = True
    ended(self, rank, code, facts)
    self.stop = before


def mute(self: OtherHosts, host: Any, now: float) -> Any:
    found = look(self, host, now)
    return None if found is not None and found.kind == "heard" else found


def miscounted(self: WorkerRegistry, ranks: Any, patience: float, count: int) -> set[int]:
    return tell_to_save(self, ranks, patience, count + 1)


tell_to_save = WorkerRegistry.tell_to_save
hear, lose, give, ending, heard = (
    Contact.hear,
    Membership.lose,
    Rendezvous.give,
    Rendezvous.ending,
    Silences.heard,
)
turn, host_turn, advance, signal, ended = (
    Termination.turn,
    HostJob.turn,
    Stop.advance,
    HostJob._signal,
    HostJob.ended,
)
look = OtherHosts._look

JOB_MUTATIONS: Mapping[str, tuple[Any, str, Any]] = {
    "an agent that is silent is never given up": (Contact, "silent", lambda self, now: []),
    "what an agent says is not checked": (Contact, "hear", lambda self, node, frame, uptime: ""),
    "clocks of hosts are taken for the same": (Contact, "hear", deaf),
    "ranks that are left learn nothing of a loss": (Membership, "_tell", nothing),
    "only the first loss counts": (Membership, "lose", once),
    "a lost rank stays a member": (Rendezvous, "regroup", stays),
    "a question of an older generation is answered": (Rendezvous, "_is_outdated", lambda self, question: False),
    "whoever waits is not refused when ranks are lost": (Rendezvous, "refuse", nothing),
    "a question may wait ten times as long as it has asked": (Rendezvous, "give", patient),
    "a rank that has reported its end is not at its end": (Rendezvous, "ending", unfinished),
    "whoever is reported first is blamed": (cause_module, "find_cause", first_told),
    "ranks without which others train on are blamed": (Cause, "excuse", nothing),
    "whoever has waited is blamed": (Cause, "_is_consequence", lambda self, ending, record: False),
    "a rank that could not go on is no cause": (Cause, "hold", nothing),
    "agents may take for ever to end": (Termination, "turn", lambda self, now: turn(self, now) and False),
    "a failure ends nobody": (Termination, "fail_by", nothing),
    "the user's signal ends nobody": (Termination, "end", lambda self, number, who, now: 0.0),
    "ranks for which all wait are never given up": (Membership, "_give_up_silent", nothing),
    "a rank that left early is not lost": (Membership, "_go_on_without_missed", nothing),
    "a connection that has failed is not made again": (Membership, "_connect_anew", nothing),
    "a rank that asks to connect again gets no answer": (Membership, "_answer_all", nothing),
    "no rank counts as waiting": (Waiting, "lasts", lambda self, seen, now: False),
    "all ranks count as waiting": (Waiting, "lasts", lambda self, seen, now: True),
    "hosts that do not hear each other are not known": (Silences, "silent", nothing),
    "hosts that hear each other again go on to count as cut": (Silences, "heard", still_cut),
    "a rank that was lost is never started again": (Replacements, "turn", nothing),
    "no host takes the place of a lost one": (Joining, "turn", nothing),
    "a lost host does not end the job": (Endings, "lose", lambda self, node, text, now, at=0.0: None),
    "a rank that failed is not reported": (Endings, "failed", nothing),
    "a launcher that is silent is never given up": (LauncherContact, "is_lost", never),
    "the time in which an agent slept is the launcher's silence": (LauncherContact, "is_lost", sleepless),
    "workers live on without a launcher": (HostJob, "turn", blind),
    "workers that do not heed SIGTERM are not killed": (Stop, "advance", gentle),
    "a signal for one rank reaches all of its host": (HostJob, "_signal", to_all),
    "each worker that ends was stopped": (HostJob, "ended", stopped),
    "no new worker is started on a host": (HostJob, "_start_anew", nothing),
    "orders to save have other numbers than the launcher has given them": (WorkerRegistry, "tell_to_save", miscounted),
    "a shim that is killed has not ended": (HostJob, "hung_up", lambda self, line: self.registry.hung_up(line)),
    "a job that ends waits for shims that have not come": (Shims, "dismiss", nothing),
    "an agent that was told to end is no cause": (Cause, "tell_to_end", nothing),
    "a host that is heard again is not told": (OtherHosts, "_look", mute),
    "the time in which an agent slept is other hosts' silence": (OtherHosts, "_excuse", nothing),
}
"""Each fault by what it is: what it replaces, and by what."""
