"""Exchanges values between a job's ranks through the launcher. Each rank receives the values of all ranks once every
rank still in the job has sent its own. If one of them waits in vain, none receives them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

from dadt.control.frame import Frame
from dadt.errors import StartTimeout
from dadt.launch.actions import Event, Outbox, Reply
from dadt.launch.members.board import Board, Want, together
from dadt.launch.members.member import Member

MOST_EXCHANGES = 1 << 16
MOST_GIVEN = 256 << 20
"""Largest number of bytes of one rank that the launcher stores for exchanges that are not complete."""
MOST_NAMED = 16
"""Largest number of ranks that one message names."""


@dataclass(slots=True)
class KeyExchange:
    """Values that ranks exchange under one key, and the ranks that wait until every rank has sent its value."""

    begun: float
    """Time (time.monotonic) at which the first value under this key arrived."""
    island: int = -1
    """Number of the only island whose ranks exchange these values; -1 if all ranks do."""
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
    """Exchanges values between ranks. Each waiting rank is answered once all ranks have sent their values, or with an
    error once a rank that has not sent its value has ended."""

    def __init__(self, hosts: Sequence[str], outbox: Outbox, now: float, island_size: int = 0) -> None:
        """hosts: name of each rank's host; the names are empty in a job of one host. island_size: ranks of an island;
        0 without islands."""
        self._outbox = outbox
        self.members = [Member(rank, host, seen=now) for rank, host in enumerate(hosts)]
        self.present = list(self.members)
        """The ranks still in the job, in the order of ranks."""
        self._exchanges: dict[str, KeyExchange] = {}
        self._over: set[str] = set()
        """Keys of exchanges that are complete."""
        self._failed: dict[str, Frame] = {}
        """Keys of exchanges in which ranks have waited in vain, each with the answer to ranks that come later."""
        self._last: dict[int, str] = {}
        """For each island, the key of the last exchange among its ranks alone. Those before are forgotten."""
        self._given = Counter[int]()
        """For each rank, the number of bytes that it has sent for exchanges that are not complete."""
        self._boards = [Board() for _ in range(island_size or 1)]
        """For each position in an island, what its ranks store for one another: they wait for no other ones."""
        self._images = 0
        """Number of times that ranks have replaced their processes (exec) during training. Several ranks that do so
        together count once."""
        self.generation = 0
        """Number of times that ranks have connected again, because a rank was lost, a rank joined, or a connection
        failed."""
        self.outdated = Frame("exchanged")
        """Answer to requests of ranks that have not learned of the current generation yet."""

    def regroup(self, lost: Collection[int], text: str, now: float) -> None:
        """Begin a new generation of ranks, without the ranks `lost`, of which there may be none. All waiting requests
        are refused with this text."""
        for rank in lost:
            self.members[rank].lost = True
        self._begin_anew(text, now)

    def join(self, members: Iterable[Member], text: str, now: float) -> None:
        """Begin a new generation of ranks, in which these lost ranks take part again. All waiting requests are refused
        with this text."""
        for member in members:
            member.lost, member.joined = False, True
        self._begin_anew(text, now)

    def start_over(self, member: Member, text: str, now: float) -> bool:
        """Record that a rank's process has replaced itself (exec) while it trained. If the other ranks do so as well,
        all of them start over together. Returns whether this rank is the first to do so."""
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
        """Answer all waiting ranks with this refusal, and delete all values that ranks have sent."""
        for exchange in self._exchanges.values():
            for *_, reply in exchange.waits:
                reply(refusal, now)
        for table in (self._exchanges, self._over, self._failed, self._last, self._given):
            table.clear()
        for board in self._boards:
            board.clear(refusal, now)

    def give_up(self, refusal: Frame, now: float) -> None:
        """Answer all waiting ranks with this refusal, and those that come later to the same exchanges."""
        keys = list(self._exchanges)
        self.refuse(refusal, now)
        self._failed = dict.fromkeys(keys, refusal)

    def stalled(self, seconds: float, now: float) -> list[StalledRanks]:
        """Return the exchanges in which ranks have waited for more than `seconds` seconds. Each is returned only
        once."""
        found = [
            (key, ranks, self._awaited(key, ranks, position))
            for position, board in enumerate(self._boards)
            for key, ranks in board.stalled(seconds, now)
        ]
        for key, exchange in self._exchanges.items():
            if exchange.waits and not exchange.told and now - exchange.begun > seconds:
                exchange.told = True
                ranks = set(exchange.blobs)
                found.append((key, ranks, [each for each in self._among(exchange) if each.rank not in ranks]))
        return [StalledRanks(*each) for each in found if each[-1]]

    def _among(self, exchange: KeyExchange) -> list[Member]:
        """Return the ranks still in the job that exchange these values."""
        first, size = exchange.island * len(self._boards), len(self._boards)
        return self.present if first < 0 else [each for each in self.members[first : first + size] if not each.lost]

    def _awaited(self, key: str, come: Set[int], position: int) -> list[Member]:
        """Return the ranks for which those of a position wait under a key, and others of islands that have not come
        either, which may be why these do not. come: ranks of the position that have come."""
        come = {*come, *(rank for board in self._boards for rank in board.come(key))}
        absent = [member for member in self.present if member.rank not in come]
        size = len(self._boards)
        return [each for each in absent if each.rank % size == position or not (each.claimed and each.finished)]

    def _board(self, rank: int) -> Board:
        return self._boards[rank % len(self._boards)]

    def reply_to(self, question: Event) -> Reply:
        """Return the function that answers a worker's question. The rank counts as waiting until this function is
        called."""
        member: Member = self.members[question.frame["rank"]]
        starts = member.step <= 0 and question.frame.get("generation", 0) == 0
        return member.waiting.begin(self._outbox.reply(question), starts, question.now)

    def _is_outdated(self, question: Event) -> bool:
        """Refuse a rank's question if the rank has not learned of the current generation of ranks yet, or is not in it.
        Returns whether the question was refused."""
        frame = question.frame
        if frame.get("generation", 0) == self.generation and not self.members[frame["rank"]].lost:
            return False
        self._outbox.reply(question)(self.outdated, question.now)
        return True

    def exchange(self, question: Event) -> None:
        """Store a rank's value for an exchange. The rank is answered once all ranks have sent their values."""
        if not self._is_outdated(question):
            frame, reply = question.frame, self.reply_to(question)
            key, island = frame["key"], frame["rank"] // len(self._boards) if frame.get("island") else -1
            key = f"{key} in island {island}" if island >= 0 else key
            self.give(key, frame["rank"], frame.body, frame["timeout"], reply, question.now, island)

    def give(
        self, key: str, rank: int, blob: bytes, timeout: float, reply: Reply, now: float, island: int = -1
    ) -> None:
        if (refusal := self._failed.get(key)) is not None:
            reply(refusal, now)
            return
        over, given = key in self._over, self._given[rank]
        exchanges = len(self._exchanges) + len(self._over) + len(self._failed) + (key not in self._exchanges)
        if over or exchanges > MOST_EXCHANGES or given + len(blob) > MOST_GIVEN:
            what = "which all have given already" if over else f"beside {given:,} that others have not met"
            text = f"rank {rank} gives {len(blob):,} bytes for {key!r}, {what}: {MOST_GIVEN:,} at once are the most"
            reply(Frame("error", {"type": "DadtError", "message": text}), now)
            return
        exchange = self._exchanges.setdefault(key, KeyExchange(now, island))
        self._given[rank] += len(blob) - len(exchange.blobs.get(rank, b""))
        exchange.blobs[rank] = blob
        exchange.waits.append((now + timeout, timeout, reply))
        if len(exchange.blobs) == len(self._among(exchange)):
            self._complete(key, exchange, now)

    def put(self, question: Event) -> None:
        """Store a value of a rank, which other ranks can get."""
        if self._is_outdated(question):
            return
        frame, now = question.frame, question.now
        refusal = self._board(frame["rank"]).put(frame["key"], frame["rank"], frame.body, now)
        answer = Frame("error", {"type": "DadtError", "message": refusal}) if refusal else Frame("taken")
        self._outbox.reply(question)(answer, now)

    def get(self, question: Event) -> None:
        """Answer a rank's request for values of other ranks, once these ranks have stored them."""
        if not self._is_outdated(question):
            frame, now = question.frame, question.now
            reply, deadline = self.reply_to(question), now + frame["timeout"]
            want = Want(frame["rank"], frame["keys"], deadline, frame["timeout"], reply)
            self._board(want.rank).want(want, now)

    def started(self, event: Event) -> None:
        self.members[event.frame["rank"]].pid = event.frame["pid"]

    def beat(self, event: Event) -> None:
        """Record from an agent's report the steps of its ranks, and the conditions that prevent ranks from making
        steps."""
        for rank, (step, age) in event.frame["steps"].items():
            member = self.members[int(rank)]
            member.went_to(step, event.now - age)
            member.found(event.frame["conditions"].get(rank, ""), event.now)

    def numbers(self, event: Event) -> None:
        self.members[event.frame["rank"]].went_to(event.frame["step"], event.now)

    def ending(self, event: Event) -> None:
        """Record that a rank's script has ended. Its process may still be running."""
        member = self.members[event.frame["rank"]]
        member.went_to(event.frame["steps"], event.now)
        member.gathered, member.finished = event.frame["gathered"], True
        member.sign(f"has ended after {event.frame['steps']} steps", event.now)

    def settle(self, now: float) -> None:
        """Send a refusal to all ranks that wait for a rank which has ended, and to those whose deadline has passed.
        Call after a rank's end, and regularly."""
        if not self.waiting:
            return
        ended: list[set[int]] = [set() for _ in self._boards]
        for member in self.present:
            if member.ended:
                ended[member.rank % len(self._boards)].add(member.rank)
        for position, board in enumerate(self._boards):
            board.settle(ended[position], partial(self._answer_late, position), now)
        for key, exchange in list(self._exchanges.items()):
            gone = any(member.ended and member.rank not in exchange.blobs for member in self._among(exchange))
            deadline, timeout, _ = min(exchange.waits, key=lambda wait: wait[0])
            if gone or now >= deadline:
                what = StartTimeout.gone if gone else f"did not arrive within {timeout:g} s"
                self._fail(key, exchange, what, now)

    @property
    def waiting(self) -> bool:
        return any(board.waiting for board in self._boards) or any(
            exchange.waits for exchange in self._exchanges.values()
        )

    def _complete(self, key: str, exchange: KeyExchange, now: float) -> None:
        """Send all ranks the values of all ranks, and delete the values."""
        self._end(key)
        self._over.add(key)
        for rank, blob in exchange.blobs.items():
            self._given[rank] -= len(blob)
        answer = together([exchange.blobs[rank] for rank in sorted(exchange.blobs)])
        for *_, reply in exchange.waits:
            reply(answer, now)

    def _end(self, key: str) -> None:
        """Forget an exchange that is over, and the one before it among the same ranks if these are an island."""
        island = self._exchanges.pop(key).island
        if island >= 0:
            before = self._last.get(island, "")
            self._over.discard(before)
            self._failed.pop(before, None)
            self._last[island] = key

    def _fail(self, key: str, exchange: KeyExchange, what: str, now: float) -> None:
        """Refuse all ranks that wait in this exchange, and those that come later, so that some of them cannot act on
        values that others did not get."""
        self._end(key)
        missing = [member for member in self._among(exchange) if member.rank not in exchange.blobs]
        refusal = self._failed[key] = _refuse(key, missing, what)
        for rank, blob in exchange.blobs.items():
            self._given[rank] -= len(blob)
        for *_, reply in exchange.waits:
            reply(refusal, now)

    def _answer_late(self, position: int, key: str, come: Set[int], what: str) -> Frame:
        """Return the error for ranks of this position that wait in vain for those which have not come."""
        return _refuse(key, self._awaited(key, come, position), what)


def _refuse(key: str, missing: Sequence[Member], what: str) -> Frame:
    """Return the error for ranks that wait in vain for these."""
    if what == StartTimeout.gone:
        missing = [member for member in missing if member.ended]
    return Frame("error", {"type": "StartTimeout", "message": f"{named(missing)} {what} for {key!r}"})


def named(members: Sequence[Member]) -> str:
    """Return a text that names these ranks, each with its host and state; if there are very many, only the first
    ones."""
    more = [f"{len(members) - MOST_NAMED} more ranks"] if len(members) > MOST_NAMED else []
    return ", ".join([*(member.named for member in members[:MOST_NAMED]), *more])
