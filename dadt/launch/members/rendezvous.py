"""Blobs that the ranks of a job exchange at the launcher, once all of them or those that are left have come."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from dadt.control.frame import Frame
from dadt.launch.actions import Event, Outbox, Reply
from dadt.launch.members.board import Board, Want, together
from dadt.launch.members.member import Member

MOST_EXCHANGES = 1 << 16
MOST_GIVEN = 256 << 20
"""Most bytes of one rank that wait for those of the others."""
OVER = Frame("exchanged")


@dataclass(slots=True)
class KeyExchange:
    """Blobs under one key, and the ranks that wait for all of them."""

    begun: float
    """When the first of them came (time.monotonic)."""
    blobs: dict[int, bytes] = field(default_factory=dict)
    complete: Frame | None = None
    """The answer to all ranks; OVER once it was given, to free the memory."""
    waits: list[tuple[float, float, Reply]] = field(default_factory=list)
    """Deadline, timeout in seconds, and where the answer goes."""
    told: bool = False
    """Whether the user has been warned that it takes long."""


@dataclass(frozen=True, slots=True)
class StalledRanks:
    """Ranks that wait, and those for which they do."""

    key: str
    ranks: set[int]
    missing: Sequence[Member]


class Rendezvous:
    """Collects the blobs of all ranks. Answers once all have come, or with an error once some cannot."""

    def __init__(self, hosts: Sequence[str], outbox: Outbox, now: float) -> None:
        """hosts: name of each rank's host; empty names in a job of one host."""
        self._outbox = outbox
        self.members = [Member(rank, host, seen=now) for rank, host in enumerate(hosts)]
        self._exchanges: dict[str, KeyExchange] = {}
        self._board = Board()
        self._images = 0
        """How often ranks have replaced themselves, all of them or some."""
        self.generation = 0
        """How often the ranks have met again: those that are left, or others, too, that join."""
        self.outdated = OVER
        """The answer to questions of older generations."""

    @property
    def present(self) -> list[Member]:
        return [member for member in self.members if not member.lost]

    def regroup(self, lost: Collection[int], text: str, now: float) -> None:
        """Have the other ranks meet again, without these. What they wait for now is refused. lost: may be none."""
        for rank in lost:
            self.members[rank].lost = True
        self._begin_anew(text, now)

    def join(self, member: Member, text: str, now: float) -> None:
        """Have all ranks meet again, with this one."""
        member.lost, member.joined = False, True
        self._begin_anew(text, now)

    def start_over(self, member: Member, text: str, now: float) -> bool:
        """Note that a rank's process has replaced itself after it had met the others; it meets them once more if they
        do so, too. Returns whether it is the first of them."""
        first = member.images == self._images
        if first:
            self._images += 1
            self.refuse(Frame("error", {"type": "PeerLost", "message": text}), now)
        member.images = self._images
        member.start_anew(now)
        return first

    def _begin_anew(self, text: str, now: float) -> None:
        self.generation += 1
        self.outdated = Frame("error", {"type": "PeerLost", "message": text})
        self.refuse(self.outdated, now)
        for member in self.present:
            member.generation = self.generation

    def refuse(self, refusal: Frame, now: float) -> None:
        """Answer all that wait by this, and forget what they have given."""
        for exchange in self._exchanges.values():
            for *_, reply in exchange.waits:
                reply(refusal, now)
        self._exchanges.clear()
        self._board.clear(refusal, now)

    def stalled(self, seconds: float, now: float) -> list[StalledRanks]:
        """The waits that have taken more than `seconds`, each reported once."""
        found = self._board.stalled(seconds, now)
        for key, exchange in self._exchanges.items():
            if exchange.waits and not exchange.told and now - exchange.begun > seconds:
                exchange.told = True
                found.append((key, set(exchange.blobs)))
        stalls = [StalledRanks(key, ranks, [m for m in self.present if m.rank not in ranks]) for key, ranks in found]
        return [stall for stall in stalls if stall.missing]

    def reply_to(self, question: Event) -> Reply:
        """What answers a worker's question once others have done their part. Its rank waits until then."""
        member: Member = self.members[question.frame["rank"]]
        starts = member.step <= 0 and question.frame.get("generation", 0) == 0
        return member.waiting.begin(self._outbox.reply(question), starts, question.now)

    def _is_outdated(self, question: Event) -> bool:
        """Refuse what a rank asks that has not heard of the newest generation yet. Returns whether it was so."""
        if question.frame.get("generation", 0) == self.generation:
            return False
        self._outbox.reply(question)(self.outdated, question.now)
        return True

    def exchange(self, question: Event) -> None:
        """A rank gives a blob, and waits for those of all others."""
        if not self._is_outdated(question):
            frame, reply = question.frame, self.reply_to(question)
            self.give(frame["key"], frame["rank"], frame.body, frame["timeout"], reply, question.now)

    def give(self, key: str, rank: int, blob: bytes, timeout: float, reply: Reply, now: float) -> None:
        exchange = self._exchanges.setdefault(key, KeyExchange(now))
        given = sum(len(each.blobs.get(rank, b"")) for each in self._exchanges.values())
        if exchange.complete or len(self._exchanges) > MOST_EXCHANGES or given + len(blob) > MOST_GIVEN:
            what = "which all have given already" if exchange.complete else f"beside {given:,} that others have not met"
            text = f"rank {rank} gives {len(blob):,} bytes for {key!r}, {what}: {MOST_GIVEN:,} at once are the most"
            reply(Frame("error", {"type": "DadtError", "message": text}), now)
            return
        exchange.blobs[rank] = blob
        exchange.waits.append((now + timeout, timeout, reply))
        self.settle(now)

    def put(self, question: Event) -> None:
        """A rank stores a blob for other ranks."""
        if self._is_outdated(question):
            return
        frame, now = question.frame, question.now
        refusal = self._board.put(frame["key"], frame["rank"], frame.body, now)
        answer = Frame("error", {"type": "DadtError", "message": refusal}) if refusal else Frame("taken")
        self._outbox.reply(question)(answer, now)

    def get(self, question: Event) -> None:
        """A rank waits for blobs that others store."""
        if not self._is_outdated(question):
            frame, now = question.frame, question.now
            reply, deadline = self.reply_to(question), now + frame["timeout"]
            self._board.want(Want(frame["rank"], frame["keys"], deadline, frame["timeout"], reply), now)

    def started(self, event: Event) -> None:
        self.members[event.frame["rank"]].pid = event.frame["pid"]

    def beat(self, event: Event) -> None:
        """An agent tells how far its ranks are, and what keeps them from going on."""
        for rank, (step, age) in event.frame["steps"].items():
            member = self.members[int(rank)]
            member.went_to(step, event.now - age)
            member.condition = event.frame["conditions"].get(rank, "")

    def numbers(self, event: Event) -> None:
        self.members[event.frame["rank"]].went_to(event.frame["step"], event.now)

    def ending(self, event: Event) -> None:
        """A rank's script is over; its process may still exit by itself."""
        member = self.members[event.frame["rank"]]
        member.went_to(event.frame["steps"], event.now)
        member.finished = True
        member.sign(f"has ended after {event.frame['steps']} steps", event.now)

    def settle(self, now: float) -> None:
        """Answer all ranks that can be answered now. Call it after every change, and as time passes."""
        self._board.settle((member.rank for member in self.present if member.ended), self._refuse, now)
        for key, exchange in self._exchanges.items():
            if exchange.complete:
                continue
            missing = [member for member in self.present if member.rank not in exchange.blobs]
            waits, exchange.waits = exchange.waits, []
            for deadline, timeout, reply in waits:
                if not missing:
                    exchange.complete = exchange.complete or self._complete(exchange)
                    reply(exchange.complete, now)
                elif any(member.ended for member in missing):
                    reply(_refuse(key, missing, "cannot arrive any more"), now)
                elif now >= deadline:
                    reply(_refuse(key, missing, f"did not arrive within {timeout:g} s"), now)
                else:
                    exchange.waits.append((deadline, timeout, reply))
            if exchange.complete and exchange.blobs:
                exchange.blobs, exchange.complete = {}, OVER  # all ranks have been answered

    @property
    def waiting(self) -> bool:
        return self._board.waiting or any(exchange.waits for exchange in self._exchanges.values())

    def _complete(self, exchange: KeyExchange) -> Frame:
        return together([exchange.blobs[member.rank] for member in self.present])

    def _refuse(self, key: str, present: set[int], what: str) -> Frame:
        return _refuse(key, [member for member in self.present if member.rank not in present], what)


def _refuse(key: str, missing: list[Member], what: str) -> Frame:
    if what.startswith("cannot"):
        missing = [member for member in missing if member.ended]
    ranks = ", ".join(member.named for member in missing)
    return Frame("error", {"type": "StartTimeout", "message": f"{ranks} {what} for {key!r}"})
