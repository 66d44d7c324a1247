"""The ranks of a job as the launcher knows them: the progress of each, and the exchange of blobs between them."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from dadt.control.condition import HELD, TEXTS
from dadt.control.frame import Frame
from dadt.launch.monitor.board import Board, Want, together
from dadt.launch.monitor.waits import Reply

MOST_EXCHANGES = 1 << 16
MOST_GIVEN = 256 << 20
"""Most bytes of one rank that wait for those of the others."""
OVER = Frame("exchanged")


@dataclass(slots=True)
class Member:
    """One rank, as the launcher knows it."""

    rank: int
    host: str = ""
    pid: int = 0
    state: str = "has not imported torch"
    step: int = -1
    seen: float = 0.0
    """Time of its last sign of life (time.monotonic)."""
    condition: str = ""
    """Why it makes no steps, according to the kernel: a key of condition.TEXTS, or empty."""
    claimed: bool = False
    """Whether a process of it trains or has trained."""
    ended: bool = False
    """Whether its process has exited."""
    lost: float = 0.0
    """When the others began to train on without it, in seconds since the epoch; 0: it is there."""
    joined: bool = False
    """Whether its worker was started in the running job, in place of one that was lost."""
    generation: int = 0
    """The newest generation of ranks in which it was: how often it has met the others again."""
    images: int = 0
    """How often its process, or another rank's before, has replaced itself amid training."""
    finished: bool = False
    """Whether its script is over, so that it waits for the others."""

    def sign(self, state: str) -> None:
        self.state = state
        self.seen = time.monotonic()

    def start_anew(self) -> None:
        """Note that a new worker starts in its place."""
        self.ended = self.claimed = self.finished = False
        self.step = -1
        self.sign("is started anew")

    def went_to(self, step: int, age: float) -> None:
        if step >= 0:
            self.step = step
            if not (self.ended or self.finished):
                self.state = f"at step {step}"
            self.seen = max(self.seen, time.monotonic() - age)

    @property
    def place(self) -> str:
        return f"pid {self.pid}{f' on {self.host}' if self.host else ''}"

    @property
    def held(self) -> str:
        """The condition that keeps it from going on, as text; empty if there is none."""
        return self._condition if self.condition in HELD and not self.ended else ""

    @property
    def standing(self) -> str:
        """Its state and its condition, as text."""
        if self.lost:
            return f"lost: {self.state}"
        if self.held:
            return f"{self.held}, {self.state}"
        return f"{self.state} and {self._condition}" if self.condition and not self.ended else self.state

    @property
    def _condition(self) -> str:
        return TEXTS[self.condition].format(place=self.place, pid=self.pid)

    @property
    def named(self) -> str:
        return f"rank {self.rank} ({f'on {self.host}, ' if self.host else ''}{self.standing})"

    def describe(self) -> dict[str, Any]:
        seconds = time.monotonic() - self.seen
        return {
            "rank": self.rank,
            "host": self.host,
            "pid": self.pid,
            "state": self.standing,
            "step": self.step,
            "seconds": seconds,
        }


@dataclass(slots=True)
class Exchange:
    """Blobs under one key, and the ranks that wait for all of them."""

    blobs: dict[int, bytes] = field(default_factory=dict)
    complete: Frame | None = None
    """The answer to all ranks; OVER once it was given, to free the memory."""
    waits: list[tuple[float, float, Reply]] = field(default_factory=list)
    """Deadline, timeout in seconds, and where the answer goes."""
    begun: float = field(default_factory=lambda: time.monotonic())
    told: bool = False
    """Whether the user has been warned that it takes long."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Ranks that wait, and those for which they do."""

    key: str
    ranks: set[int]
    missing: Sequence[Member]


class Rendezvous:
    """Collects the blobs of all ranks. Answers once all have come, or with an error once some cannot."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """hosts: name of each rank's host; empty names in a job of one host."""
        self.members = [Member(rank, host, seen=time.monotonic()) for rank, host in enumerate(hosts)]
        self._exchanges: dict[str, Exchange] = {}
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

    def regroup(self, lost: Collection[int], text: str) -> None:
        """Have the other ranks meet again, without these. What they wait for now is refused. lost: may be none."""
        for rank in lost:
            self.members[rank].lost = time.time()
        self._begin_anew(text)

    def join(self, member: Member, text: str) -> None:
        """Have all ranks meet again, with this one."""
        member.lost, member.joined = 0.0, True
        self._begin_anew(text)

    def start_over(self, member: Member, text: str) -> bool:
        """Note that a rank's process has replaced itself after it had met the others; it meets them once more if they
        do so, too. Returns whether it is the first of them."""
        first = member.images == self._images
        if first:
            self._images += 1
            self.refuse(Frame("error", {"type": "PeerLost", "message": text}))
        member.images = self._images
        member.start_anew()
        return first

    def _begin_anew(self, text: str) -> None:
        self.generation += 1
        self.outdated = Frame("error", {"type": "PeerLost", "message": text})
        self.refuse(self.outdated)
        for member in self.present:
            member.generation = self.generation

    def refuse(self, refusal: Frame) -> None:
        """Answer all that wait by this, and forget what they have given."""
        for exchange in self._exchanges.values():
            for *_, reply in exchange.waits:
                reply(refusal)
        self._exchanges.clear()
        self._board.clear(refusal)

    def stalled(self, seconds: float) -> list[Stall]:
        """The waits that have taken more than `seconds`, each reported once."""
        now, found = time.monotonic(), self._board.stalled(seconds)
        for key, exchange in self._exchanges.items():
            if exchange.waits and not exchange.told and now - exchange.begun > seconds:
                exchange.told = True
                found.append((key, set(exchange.blobs)))
        stalls = [Stall(key, ranks, [m for m in self.present if m.rank not in ranks]) for key, ranks in found]
        return [stall for stall in stalls if stall.missing]

    def give(self, key: str, rank: int, blob: bytes, timeout: float, reply: Reply) -> None:
        exchange = self._exchanges.setdefault(key, Exchange())
        given = sum(len(each.blobs.get(rank, b"")) for each in self._exchanges.values())
        if exchange.complete or len(self._exchanges) > MOST_EXCHANGES or given + len(blob) > MOST_GIVEN:
            what = "which all have given already" if exchange.complete else f"beside {given:,} that others have not met"
            text = f"rank {rank} gives {len(blob):,} bytes for {key!r}, {what}: {MOST_GIVEN:,} at once are the most"
            reply(Frame("error", {"type": "DadtError", "message": text}))
            return
        exchange.blobs[rank] = blob
        exchange.waits.append((time.monotonic() + timeout, timeout, reply))
        self.settle()

    def put(self, key: str, rank: int, blob: bytes) -> Frame:
        """Store a blob for other ranks. Returns the answer."""
        if refusal := self._board.put(key, rank, blob):
            return Frame("error", {"type": "DadtError", "message": refusal})
        return Frame("taken")

    def get(self, keys: Sequence[str], rank: int, timeout: float, reply: Reply) -> None:
        self._board.want(Want(rank, keys, time.monotonic() + timeout, timeout, reply))

    def settle(self) -> None:
        """Answer all ranks that can be answered now. Call it after every change, and as time passes."""
        self._board.settle((member.rank for member in self.present if member.ended), self._refuse)
        now = time.monotonic()
        for key, exchange in self._exchanges.items():
            if exchange.complete:
                continue
            missing = [member for member in self.present if member.rank not in exchange.blobs]
            waits, exchange.waits = exchange.waits, []
            for deadline, timeout, reply in waits:
                if not missing:
                    exchange.complete = exchange.complete or self._complete(exchange)
                    reply(exchange.complete)
                elif any(member.ended for member in missing):
                    reply(_refuse(key, missing, "cannot arrive any more"))
                elif now >= deadline:
                    reply(_refuse(key, missing, f"did not arrive within {timeout:g} s"))
                else:
                    exchange.waits.append((deadline, timeout, reply))
            if exchange.complete and exchange.blobs:
                exchange.blobs, exchange.complete = {}, OVER  # all ranks have been answered

    @property
    def waiting(self) -> bool:
        return self._board.waiting or any(exchange.waits for exchange in self._exchanges.values())

    def _complete(self, exchange: Exchange) -> Frame:
        return together([exchange.blobs[member.rank] for member in self.present])

    def _refuse(self, key: str, present: set[int], what: str) -> Frame:
        return _refuse(key, [member for member in self.present if member.rank not in present], what)


def _refuse(key: str, missing: list[Member], what: str) -> Frame:
    if what.startswith("cannot"):
        missing = [member for member in missing if member.ended]
    ranks = ", ".join(member.named for member in missing)
    return Frame("error", {"type": "StartTimeout", "message": f"{ranks} {what} for {key!r}"})
