"""Values that a job's ranks exchange through the launcher; each rank receives them once all ranks still in the job have
sent theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from dadt.control.frame import Frame
from dadt.launch.actions import Event, Outbox, Reply
from dadt.launch.members.board import Board, Want, together
from dadt.launch.members.member import Member

MOST_EXCHANGES = 1 << 16
MOST_GIVEN = 256 << 20
"""Most bytes from one rank that the launcher stores while other ranks have not given theirs."""
MOST_NAMED = 16
"""Most ranks that one message names."""


@dataclass(slots=True)
class KeyExchange:
    """Values that ranks exchange under one key, and the ranks that wait until all have given theirs."""

    begun: float
    """Time (time.monotonic) at which the first value under this key arrived."""
    blobs: dict[int, bytes] = field(default_factory=dict)
    waits: list[tuple[float, float, Reply]] = field(default_factory=list)
    """For each waiting rank: its deadline, its timeout in seconds, and the function that answers it."""
    told: bool = False
    """Whether the user has been warned that this exchange takes long."""


@dataclass(frozen=True, slots=True)
class StalledRanks:
    """Ranks that have waited long, and the ranks that they wait for."""

    key: str
    ranks: set[int]
    missing: Sequence[Member]


class Rendezvous:
    """Exchanges values between ranks: answers each rank once all have given theirs, or with an error once a rank cannot
    give its value any more."""

    def __init__(self, hosts: Sequence[str], outbox: Outbox, now: float) -> None:
        """hosts: name of each rank's host; the names are empty in a job of one host."""
        self._outbox = outbox
        self.members = [Member(rank, host, seen=now) for rank, host in enumerate(hosts)]
        self.present = list(self.members)
        """Ranks still in the job, in their order."""
        self._exchanges: dict[str, KeyExchange] = {}
        self._over: set[str] = set()
        """Keys under which all ranks have given their values."""
        self._given = Counter[int]()
        """For each rank, the bytes that it has given under keys for which other ranks have not given their values yet.
        """
        self._board = Board()
        self._images = 0
        """How often ranks have replaced their processes (exec) during training; if several ranks do so together, this
        counts once."""
        self.generation = 0
        """How often ranks have connected again: after a loss, for a rank that joins, or after a broken connection."""
        self.outdated = Frame("exchanged")
        """Answer to ranks that ask on behalf of an older generation."""

    def regroup(self, lost: Collection[int], text: str, now: float) -> None:
        """Begin a new generation of ranks without the ranks `lost`, which may be empty. All requests that wait now are
        refused with this text."""
        for rank in lost:
            self.members[rank].lost = True
        self._begin_anew(text, now)

    def join(self, member: Member, text: str, now: float) -> None:
        """Begin a new generation of ranks that includes this rank again. All requests that wait now are refused with
        this text."""
        member.lost, member.joined = False, True
        self._begin_anew(text, now)

    def start_over(self, member: Member, text: str, now: float) -> bool:
        """Record that a rank's process has replaced itself (exec) after it had begun to train. If the other ranks do so
        as well, all of them start over together. Returns whether this rank is the first."""
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
        self.present = [member for member in self.members if not member.lost]
        for member in self.present:
            member.generation = self.generation

    def refuse(self, refusal: Frame, now: float) -> None:
        """Answer all waiting ranks with this refusal, and delete all values that ranks have given or stored."""
        for exchange in self._exchanges.values():
            for *_, reply in exchange.waits:
                reply(refusal, now)
        for table in (self._exchanges, self._over, self._given):
            table.clear()
        self._board.clear(refusal, now)

    def stalled(self, seconds: float, now: float) -> list[StalledRanks]:
        """Return the waits that have taken more than `seconds` seconds. Each is returned only once."""
        found = self._board.stalled(seconds, now)
        for key, exchange in self._exchanges.items():
            if exchange.waits and not exchange.told and now - exchange.begun > seconds:
                exchange.told = True
                found.append((key, set(exchange.blobs)))
        stalls = [StalledRanks(key, ranks, [m for m in self.present if m.rank not in ranks]) for key, ranks in found]
        return [stall for stall in stalls if stall.missing]

    def reply_to(self, question: Event) -> Reply:
        """Return the function that answers a worker's question. Until this function is called, the rank counts as
        waiting."""
        member: Member = self.members[question.frame["rank"]]
        starts = member.step <= 0 and question.frame.get("generation", 0) == 0
        return member.waiting.begin(self._outbox.reply(question), starts, question.now)

    def _is_outdated(self, question: Event) -> bool:
        """Refuse a rank's question if the rank has not learned of the newest generation of ranks yet. Returns whether
        it was refused."""
        if question.frame.get("generation", 0) == self.generation:
            return False
        self._outbox.reply(question)(self.outdated, question.now)
        return True

    def exchange(self, question: Event) -> None:
        """Store a rank's value for an exchange. The rank is answered once all ranks have given their values."""
        if not self._is_outdated(question):
            frame, reply = question.frame, self.reply_to(question)
            self.give(frame["key"], frame["rank"], frame.body, frame["timeout"], reply, question.now)

    def give(self, key: str, rank: int, blob: bytes, timeout: float, reply: Reply, now: float) -> None:
        over, given = key in self._over, self._given[rank]
        exchanges = len(self._exchanges) + len(self._over) + (key not in self._exchanges)
        if over or exchanges > MOST_EXCHANGES or given + len(blob) > MOST_GIVEN:
            what = "which all have given already" if over else f"beside {given:,} that others have not met"
            text = f"rank {rank} gives {len(blob):,} bytes for {key!r}, {what}: {MOST_GIVEN:,} at once are the most"
            reply(Frame("error", {"type": "DadtError", "message": text}), now)
            return
        exchange = self._exchanges.setdefault(key, KeyExchange(now))
        self._given[rank] += len(blob) - len(exchange.blobs.get(rank, b""))
        exchange.blobs[rank] = blob
        exchange.waits.append((now + timeout, timeout, reply))
        if len(exchange.blobs) == len(self.present):
            self._complete(key, exchange, now)

    def put(self, question: Event) -> None:
        """Store a value that a rank sends for other ranks to get."""
        if self._is_outdated(question):
            return
        frame, now = question.frame, question.now
        refusal = self._board.put(frame["key"], frame["rank"], frame.body, now)
        answer = Frame("error", {"type": "DadtError", "message": refusal}) if refusal else Frame("taken")
        self._outbox.reply(question)(answer, now)

    def get(self, question: Event) -> None:
        """Answer a rank with values of other ranks, once these ranks have stored them."""
        if not self._is_outdated(question):
            frame, now = question.frame, question.now
            reply, deadline = self.reply_to(question), now + frame["timeout"]
            self._board.want(Want(frame["rank"], frame["keys"], deadline, frame["timeout"], reply), now)

    def started(self, event: Event) -> None:
        self.members[event.frame["rank"]].pid = event.frame["pid"]

    def beat(self, event: Event) -> None:
        """Record an agent's report of its ranks' steps, and of what prevents ranks from making steps."""
        for rank, (step, age) in event.frame["steps"].items():
            member = self.members[int(rank)]
            member.went_to(step, event.now - age)
            member.condition = event.frame["conditions"].get(rank, "")

    def numbers(self, event: Event) -> None:
        self.members[event.frame["rank"]].went_to(event.frame["step"], event.now)

    def ending(self, event: Event) -> None:
        """Record that a rank's script is over, while its process may still be running."""
        member = self.members[event.frame["rank"]]
        member.went_to(event.frame["steps"], event.now)
        member.gathered, member.finished = event.frame["gathered"], True
        member.sign(f"has ended after {event.frame['steps']} steps", event.now)

    def settle(self, now: float) -> None:
        """Refuse all ranks that wait for a rank which has ended, and those whose deadline has passed. Call after an
        end, and regularly."""
        if not self.waiting:
            return
        ended = [member for member in self.present if member.ended]
        self._board.settle((member.rank for member in ended), self._refuse, now)
        for key, exchange in self._exchanges.items():
            gone = any(member.rank not in exchange.blobs for member in ended)
            due = [wait for wait in exchange.waits if gone or now >= wait[0]]
            if due:
                exchange.waits = [wait for wait in exchange.waits if not (gone or now >= wait[0])]
            refusals = dict[str, Frame]()
            for _, timeout, reply in due:
                what = "cannot arrive any more" if gone else f"did not arrive within {timeout:g} s"
                if what not in refusals:
                    refusals[what] = self._refuse(key, exchange.blobs.keys(), what)
                reply(refusals[what], now)

    @property
    def waiting(self) -> bool:
        return self._board.waiting or any(exchange.waits for exchange in self._exchanges.values())

    def _complete(self, key: str, exchange: KeyExchange, now: float) -> None:
        """Answer all ranks with the values of all ranks, and delete the values."""
        del self._exchanges[key]
        self._over.add(key)
        for rank, blob in exchange.blobs.items():
            self._given[rank] -= len(blob)
        answer = together([exchange.blobs[rank] for rank in sorted(exchange.blobs)])
        for *_, reply in exchange.waits:
            reply(answer, now)

    def _refuse(self, key: str, present: Collection[int], what: str) -> Frame:
        """Return the answer to ranks that wait in vain for the ranks other than `present`."""
        missing = [member for member in self.present if member.rank not in present]
        if what.startswith("cannot"):
            missing = [member for member in missing if member.ended]
        return Frame("error", {"type": "StartTimeout", "message": f"{named(missing)} {what} for {key!r}"})


def named(members: Sequence[Member]) -> str:
    """Describe these ranks in a text, each with its host and state; if there are very many, only the first ones."""
    more = [f"{len(members) - MOST_NAMED} more ranks"] if len(members) > MOST_NAMED else []
    return ", ".join([*(member.named for member in members[:MOST_NAMED]), *more])
