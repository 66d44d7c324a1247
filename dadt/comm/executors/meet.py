"""Rendezvous of ranks: how a rank exchanges bytes with its peers before a library connects them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol, TypeVar

from dadt.comm.executors.kept import KeptGroup
from dadt.control.worker_line import WorkerLine
from dadt.errors import DadtError, PeerLost
from dadt.world import World

PATIENCE = 3.0
"""Seconds of waiting after which a rank reports what it waits for."""
_LOOK_SECONDS = 0.05
Made = TypeVar("Made")


class Meet(Protocol):
    """Exchange of bytes between a rank and its peers before a library connects them. Each key is used once. `exchange`
    and `get` wait for the peers and raise StartTimeout if they do not come in time."""

    @property
    def secret(self) -> bytes:
        """Secret that only the ranks of this rendezvous know; empty if there is none."""
        return b""

    @property
    def outdated(self) -> bool | None:
        """True if some of these ranks are lost and the job continues without them, so that waiting for all is
        pointless; None if the job cannot continue without lost ranks."""
        return None

    @property
    def kept(self) -> KeptGroup | None:
        """Connections of these ranks that stand although their group has failed; None if the job cannot continue
        without lost ranks."""
        return None

    def look(self, what: str, waited: float) -> None:
        """Report to the user's launcher that this rank has waited `waited` seconds for its peers in step `what` of the
        start. Does nothing by default."""
        return

    def say(self, text: str) -> None:
        """Show this text to the user, if the ranks have a launcher or store that can do so. Does nothing by default."""
        return

    def exchange(self, key: str, blob: bytes) -> list[bytes]:
        """Publish this rank's `blob` and return every rank's, ordered by rank. Raises StartTimeout."""

    def put(self, key: str, blob: bytes) -> None:
        """Publish a value under `key`, without waiting for other ranks; any rank may read the value with get()."""

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for the values that any ranks publish under `keys`, and return them. Raises StartTimeout."""


@dataclass(frozen=True)
class Within(Meet):
    """Base class of a rendezvous that takes place over another one."""

    meet: Meet

    @property
    def secret(self) -> bytes:
        return self.meet.secret

    @property
    def outdated(self) -> bool | None:
        return self.meet.outdated

    @property
    def kept(self) -> KeptGroup | None:
        return self.meet.kept

    def look(self, what: str, waited: float) -> None:
        self.meet.look(what, waited)

    def say(self, text: str) -> None:
        self.meet.say(text)


@dataclass(frozen=True)
class Apart(Within):
    """A rendezvous over another one of the same ranks. It prefixes each key with a name, so that several groups of
    ranks use distinct keys."""

    name: str

    def exchange(self, key: str, blob: bytes) -> list[bytes]:
        return self.meet.exchange(f"{self.name} {key}", blob)

    def put(self, key: str, blob: bytes) -> None:
        self.meet.put(f"{self.name} {key}", blob)

    def get(self, keys: Sequence[str]) -> list[bytes]:
        return self.meet.get([f"{self.name} {key}" for key in keys])


@dataclass(frozen=True)
class OneOf(Apart):
    """The rendezvous of one of several groups in which a rank is at once."""

    @property
    def kept(self) -> KeptGroup | None:
        return self.meet.kept and self.meet.kept.named(self.name)


@dataclass(frozen=True, slots=True)
class AllRanks:
    """The rendezvous (Meet) of all ranks of a world, which exchanges bytes over this rank's connection to its agent or
    store."""

    world: World
    control: WorkerLine | None
    timeout: float
    """Seconds within which the peers must join."""
    has_lost: Callable[[], bool] | None = None
    """Returns whether ranks have been lost since the world began; None if the job cannot continue without lost ranks.
    """
    tell: Callable[[str, float], None] = lambda what, waited: None
    """Function that `look` calls with what this rank waits for and the seconds waited."""
    kept: KeptGroup | None = None

    def look(self, what: str, waited: float) -> None:
        self.tell(what, waited)

    def say(self, text: str) -> None:
        if self.control is not None:
            self.control.say(text)

    @property
    def outdated(self) -> bool | None:
        return None if self.has_lost is None else self.has_lost()

    @property
    def secret(self) -> bytes:
        return b"" if self.control is None else self.control.secret

    def exchange(self, key: str, blob: bytes) -> list[bytes]:
        alone = self.world.world_size == 1
        return [blob] if alone else self._line.exchange(key, blob, self.timeout, self.world.generation)

    def put(self, key: str, blob: bytes) -> None:
        self._line.put(key, blob, self.world.generation)

    def get(self, keys: Sequence[str]) -> list[bytes]:
        return self._line.get(keys, self.timeout, self.world.generation)

    @property
    def _line(self) -> WorkerLine:
        if self.control is None:
            raise DadtError(f"rank {self.world.rank} has no agent to meet its peers: start it with `dadt run`")
        return self.control


@dataclass(frozen=True)
class Equals(Within):
    """A rendezvous among some ranks of a larger one, such as those with the same place in their islands."""

    ranks: Sequence[int]
    """Numbers of these ranks in the whole job, in the order of this rendezvous."""
    place: int
    """Index of this rank in `ranks`."""

    def exchange(self, key: str, blob: bytes) -> list[bytes]:
        keys = [f"{key}/of rank {rank}" for rank in self.ranks]
        self.meet.put(keys[self.place], blob)
        return self.meet.get(keys)

    def put(self, key: str, blob: bytes) -> None:
        self.meet.put(self._named(key), blob)

    def get(self, keys: Sequence[str]) -> list[bytes]:
        return self.meet.get([self._named(key) for key in keys])

    def _named(self, key: str) -> str:
        return f"{key} of the ranks of rank {self.ranks[0]}"


def attend(
    meet: Meet, what: str, connect: Callable[[], Made], drop: Callable[[Made], None] = lambda made: None
) -> Made:
    """Return what `connect` returns. `connect` calls a library that cannot be interrupted and waits even for ended
    ranks, so it runs in a thread. If ranks are lost, this function abandons the thread and raises PeerLost. what: what
    the library does, for reports of what this rank waits for. drop: called with the result of an abandoned thread.
    """
    if meet.outdated is None:
        return connect()
    made: queue.SimpleQueue[Made | Exception] = queue.SimpleQueue()
    lock = threading.Lock()
    abandoned = False

    def run() -> None:
        try:
            found = connect()
        except Exception as error:  # noqa: BLE001 (raised where it is waited for)
            made.put(error)
            return
        with lock:
            if not abandoned:
                made.put(found)
                return
        drop(found)

    threading.Thread(target=run, name="dadt-connecting", daemon=True).start()
    begun = looked = monotonic()
    while True:
        try:
            result = made.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            if meet.outdated:
                with lock:
                    abandoned = True
                    late = None if made.empty() else made.get()
                if late is not None and not isinstance(late, Exception):
                    drop(late)
                raise PeerLost("ranks have ended") from None
            if monotonic() - looked >= PATIENCE:
                looked = monotonic()
                meet.look(what, looked - begun)
            continue
        if isinstance(result, Exception):
            raise result
        return result
