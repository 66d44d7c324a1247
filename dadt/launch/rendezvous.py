"""What all ranks of a job must know of each other: how far each came, and what each gave to the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dadt.launch.frame import Frame

Reply = Callable[[Frame], None]
MOST_KEYS = 4096
MOST_BYTES = 16 << 20
"""That one rank may put for others: its addresses in a group of 10,000 ranks are less than 1 MB."""


@dataclass(slots=True)
class Member:
    """One rank, as the launcher knows it."""

    rank: int
    host: str = ""
    pid: int = 0
    state: str = "has not imported torch"
    step: int = -1
    seen: float = 0.0
    """When it last gave a sign of life (time.monotonic)."""
    ended: bool = False
    """Its process has exited."""
    finished: bool = False
    """Its script is over, and it waits for the others."""

    def sign(self, state: str) -> None:
        self.state = state
        self.seen = time.monotonic()

    def went_to(self, step: int, age: float) -> None:
        if step >= 0:
            self.step = step
            if not (self.ended or self.finished):
                self.state = f"at step {step}"
            self.seen = max(self.seen, time.monotonic() - age)

    @property
    def named(self) -> str:
        return f"rank {self.rank} ({f'on {self.host}, ' if self.host else ''}{self.state})"

    def describe(self) -> dict[str, Any]:
        seconds = time.monotonic() - self.seen
        return {
            "rank": self.rank,
            "host": self.host,
            "pid": self.pid,
            "state": self.state,
            "step": self.step,
            "seconds": seconds,
        }


@dataclass(slots=True)
class Exchange:
    """Blobs under one key, and the ranks that wait for all of them."""

    blobs: dict[int, bytes] = field(default_factory=dict)
    waits: list[tuple[float, float, Reply]] = field(default_factory=list)
    """Deadline, its timeout, and where the answer goes."""


@dataclass(frozen=True, slots=True)
class Want:
    """A rank that waits for what another puts under a key."""

    key: str
    rank: int
    deadline: float
    timeout: float
    reply: Reply


@dataclass(slots=True)
class Board:
    """What ranks have put there for others, by key."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    wants: list[Want] = field(default_factory=list)

    def put(self, key: str, rank: int, blob: bytes) -> str:
        """Why not, or nothing."""
        if key in self.blobs:
            return f"rank {rank}: {key!r} has been put by rank {self.owners[key]}: each key is put once"
        mine = [each for each, owner in self.owners.items() if owner == rank]
        size = sum(len(self.blobs[each]) + len(each) for each in mine) + len(key) + len(blob)
        if len(mine) >= MOST_KEYS or size > MOST_BYTES:
            return f"rank {rank} has put too much for others: {MOST_KEYS:,} keys and {MOST_BYTES:,} bytes are the most"
        self.blobs[key], self.owners[key] = blob, rank
        return ""

    def present(self, key: str) -> set[int]:
        """Ranks that have done something for the same group, and so are not who is waited for."""
        group = key.rpartition("/")[0]
        present = {owner for each, owner in self.owners.items() if group and each.startswith(f"{group}/")}
        return present | {want.rank for want in self.wants if want.key == key}


class Rendezvous:
    """Collects, and answers once all have come, or with an error once they cannot."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """hosts: each rank's; empty in a job of one host."""
        self.members = [Member(rank, host, seen=time.monotonic()) for rank, host in enumerate(hosts)]
        self._exchanges: dict[str, Exchange] = {}
        self._board = Board()

    def give(self, key: str, rank: int, blob: bytes, timeout: float, reply: Reply) -> None:
        exchange = self._exchanges.setdefault(key, Exchange())
        exchange.blobs[rank] = blob
        exchange.waits.append((time.monotonic() + timeout, timeout, reply))
        self.settle()

    def put(self, key: str, rank: int, blob: bytes) -> Frame:
        """The answer."""
        if refusal := self._board.put(key, rank, blob):
            return Frame("error", {"type": "DadtError", "message": refusal})
        self._settle_wants()
        return Frame("taken")

    def get(self, key: str, rank: int, timeout: float, reply: Reply) -> None:
        self._board.wants.append(Want(key, rank, time.monotonic() + timeout, timeout, reply))
        self._settle_wants()

    def _settle_wants(self) -> None:
        now = time.monotonic()
        board = self._board
        for want in list(board.wants):
            blob = board.blobs.get(want.key)
            present = board.present(want.key) if blob is None else set()
            missing = [member for member in self.members if member.rank not in present]
            if blob is not None:
                want.reply(Frame("got", {}, blob))
            elif any(member.ended for member in missing):
                want.reply(_refuse(want.key, missing, "cannot arrive any more"))
            elif now >= want.deadline:
                want.reply(_refuse(want.key, missing, f"did not arrive within {want.timeout:g} s"))
            else:
                continue
            board.wants.remove(want)

    def settle(self) -> None:
        """Answer what can be answered now; call it after anything has changed and when time has passed."""
        self._settle_wants()
        now = time.monotonic()
        for key, exchange in self._exchanges.items():
            missing = [member for member in self.members if member.rank not in exchange.blobs]
            waits, exchange.waits = exchange.waits, []
            for deadline, timeout, reply in waits:
                if not missing:
                    reply(self._complete(exchange))
                elif any(member.ended for member in missing):
                    reply(_refuse(key, missing, "cannot arrive any more"))
                elif now >= deadline:
                    reply(_refuse(key, missing, f"did not arrive within {timeout:g} s"))
                else:
                    exchange.waits.append((deadline, timeout, reply))

    @property
    def waiting(self) -> bool:
        return bool(self._board.wants) or any(exchange.waits for exchange in self._exchanges.values())

    def _complete(self, exchange: Exchange) -> Frame:
        blobs = [exchange.blobs[member.rank] for member in self.members]
        return Frame("exchanged", {"sizes": [len(blob) for blob in blobs]}, b"".join(blobs))


def _refuse(key: str, missing: list[Member], what: str) -> Frame:
    if what.startswith("cannot"):
        missing = [member for member in missing if member.ended]
    ranks = ", ".join(member.named for member in missing)
    return Frame("error", {"type": "StartTimeout", "message": f"{ranks} {what} for {key!r}"})
