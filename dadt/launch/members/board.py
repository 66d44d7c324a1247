"""A key-value store in the launcher, through which the ranks of a job exchange values, and the requests of ranks that
wait for keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

from dadt.control.frame import Frame
from dadt.errors import StartTimeout
from dadt.launch.actions import Reply

MOST_KEYS = 4096
MOST_TOGETHER = 1 << 30
"""Largest number of bytes of values in a single answer."""
MOST_BYTES = 16 << 20
"""Largest number of bytes that one rank may store. For comparison, a rank's addresses in a group of 10,000 ranks take
less than 1 MB."""


@dataclass(frozen=True, slots=True)
class Want:
    """A rank's request for the values of these keys, which is answered once all are stored."""

    rank: int
    keys: Sequence[str]
    deadline: float
    timeout: float
    reply: Reply

    @property
    def begun(self) -> float:
        return self.deadline - self.timeout


@dataclass(slots=True)
class Share:
    """How much of the store one rank uses: the number of keys that it has stored, and their bytes including the
    values."""

    keys: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Board:
    """The key-value store. Keys have the form GROUP/NAME, and their values are kept until all ranks connect again."""

    _blobs: dict[str, bytes] = field(default_factory=dict)
    _shares: dict[int, Share] = field(default_factory=dict)
    _present: dict[str, set[int]] = field(default_factory=dict)
    """For each group of keys: the ranks that have stored a value in it."""
    _wants: dict[str, list[Want]] = field(default_factory=dict)
    """Unanswered requests, by the first of a request's keys that is still missing."""
    _stalled: set[str] = field(default_factory=set)
    """Names of groups of keys for which the user was warned that ranks have waited long for their values."""

    def put(self, key: str, rank: int, blob: bytes, now: float) -> str:
        """Store a value. Returns the reason if the rank may not store it; otherwise an empty text."""
        share = self._shares.setdefault(rank, Share())
        if key in self._blobs:
            return f"rank {rank} puts {key!r}, which is there already: each key is put once in a job"
        size = share.bytes + len(key) + len(blob)
        if share.keys >= MOST_KEYS or size > MOST_BYTES:
            return (
                f"rank {rank} puts {share.keys + 1:,} keys of {size:,} bytes for other ranks, and {MOST_KEYS:,} keys "
                f"of {MOST_BYTES:,} bytes are the most: its script makes too many groups of ranks"
            )
        share.keys, share.bytes = share.keys + 1, size
        self._blobs[key] = blob
        self._present.setdefault(_group(key), set()).add(rank)
        for want in self._wants.pop(key, ()):
            self.want(want, now)
        return ""

    def want(self, want: Want, now: float) -> None:
        """Answer a request for values once all its keys are stored."""
        absent = next((key for key in want.keys if key not in self._blobs), None)
        if absent is None:
            blobs = [self._blobs[key] for key in dict.fromkeys(want.keys)]
            if len(blobs) < len(want.keys) or sum(map(len, blobs)) > MOST_TOGETHER:
                text = f"rank {want.rank} asks for more at once than {MOST_TOGETHER:,} bytes, or for a key twice"
                want.reply(Frame("error", {"type": "DadtError", "message": text}), now)
            else:
                want.reply(together(blobs), now)
        else:
            self._wants.setdefault(absent, []).append(want)

    def clear(self, refusal: Frame, now: float) -> None:
        """Answer all waiting requests with this refusal, and delete all values."""
        wants = [want for each in self._wants.values() for want in each]
        for table in (self._blobs, self._shares, self._present, self._wants, self._stalled):
            table.clear()
        for want in wants:
            want.reply(refusal, now)

    def come(self, key: str) -> Set[int]:
        """Return the ranks that have stored a value in a key's group, or in the group of this name."""
        return self._present.get(_group(key), set()) | self._present.get(key, set())

    @property
    def waiting(self) -> bool:
        return bool(self._wants)

    def stalled(self, seconds: float, now: float) -> list[tuple[str, set[int]]]:
        """Return the groups of keys for which a rank has waited more than `seconds` seconds, each with the ranks that
        have stored or requested a value in it. Each group is returned only once."""
        found = list[tuple[str, set[int]]]()
        for key, wants in self._wants.items():
            if (group := _group(key)) not in self._stalled and any(now - want.begun > seconds for want in wants):
                self._stalled.add(group)
                found.append((group, self._present.get(group, set()) | {want.rank for want in wants}))
        return found

    def settle(self, ended: Set[int], refuse: Callable[[str, set[int], str], Frame], now: float) -> None:
        """Refuse requests whose keys cannot arrive any more because a rank has ended, and those whose deadline has
        passed. ended: ranks that have ended. refuse: returns the answer; called with the missing key, the ranks that
        have stored or requested a value in the key's group, and a text about the problem."""
        for key, wants in list(self._wants.items()):
            present = self._present.get(_group(key), set()) | {want.rank for want in wants}
            lost = ended - present
            left = []
            for want in wants:
                if lost:
                    want.reply(refuse(key, present, StartTimeout.gone), now)
                elif now >= want.deadline:
                    want.reply(refuse(key, present, f"did not arrive within {want.timeout:g} s"), now)
                else:
                    left.append(want)
            if left:
                self._wants[key] = left
            else:
                del self._wants[key]


def together(blobs: Sequence[bytes]) -> Frame:
    """Return a frame that answers a rank with the values it asked for, one after the other."""
    return Frame("exchanged", {"sizes": [len(blob) for blob in blobs]}, b"".join(blobs))


def _group(key: str) -> str:
    return key.rpartition("/")[0]
