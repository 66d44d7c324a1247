"""TCP connections between the ranks of a group, over which both ends have proved that they belong to the job before
anything else is read."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic

from dadt._core import KeptLink
from dadt.comm.executors import mending, streams
from dadt.comm.executors.meet import Meet
from dadt.comm.executors.mending import Mender
from dadt.config import Config
from dadt.config.check import MOST_STREAMS
from dadt.config.link import pace_of
from dadt.control.connection import Listener, Reach, Refused, SealedConnection, Unreached, Words, dial, guard
from dadt.control.pacing import paced
from dadt.control.priority import set_urgent
from dadt.errors import StartTimeout
from dadt.world import World, ranked

KEY_BYTES = 32
DATA = "data"
"""Value of `use` for connections that carry data. Two ranks may have several of them."""
NOTICES = "notices"
MOST_SILENCE = 30.0
_PROBE = "probe"


@dataclass(frozen=True, slots=True)
class Connected:
    """The connections of one rank with the others of a group."""

    sockets: Mapping[str, list[list[socket.socket]]]
    """The connections of each use, by the other rank's index in the group; an empty list at this rank's own index."""
    mender: Mender | None
    """Object that replaces broken connections once it is started; None if the group has one rank only."""
    addresses: list[str]
    """Where each rank listens, by its index in the group."""
    kept: Mapping[int, KeptLink] = field(default_factory=dict)
    """Connections of all uses that both sides have kept, by the other rank's index in the group."""

    def close(self) -> None:
        if self.mender is not None:
            self.mender.close()
        for by_place in self.sockets.values():
            for each in (each for those in by_place for each in those):
                each.close()


def silence_of(config: Config) -> float:
    """Return the seconds after which a silent connection counts as broken and is replaced."""
    return min(config.timeout / 2, MOST_SILENCE)


def connect(
    uses: Sequence[str],
    name: str,
    meet: Meet,
    world: World,
    ranks: Sequence[int],
    config: Config,
    *,
    star: bool = False,
    kept: Mapping[int, KeptLink] | None = None,
) -> Connected:
    """Connect these ranks of the world with each other, or each with the first one only.

    uses: purposes of the connections; two ranks get one connection for each purpose; for DATA, they get as many as
    `--streams` says or the link needs. name: prefix of the group's keys in the rendezvous. star: whether ranks are
    connected with the first one only. kept: connections of this rank that stand, by the other rank's index in `ranks`;
    if the other rank has them, too, no new ones are made. Raises StartTimeout, naming the ranks that are not reached in
    time.
    """
    if len(ranks) == 1:
        return Connected({use: [[]] for use in uses}, None, [""])
    # A rank sends to all others at the same time over one network link, so each connection gets an equal part of its
    # rate.
    with (
        paced(pace_of(config.link) / (len(ranks) - 1)),
        _Entry(uses, name, meet, world, ranks, config, star, kept or {}) as entry,
    ):
        found = entry.connect(monotonic() + config.start_timeout)
    by_place = {use: [_in_order(found.get((use, place), {})) for place in range(len(ranks))] for use in uses}
    return Connected(by_place, entry.mender, entry.addresses, entry.kept)


def _in_order(found: Mapping[int, socket.socket]) -> list[socket.socket]:
    return [found[number] for number in sorted(found)]


class _Entry:
    """One rank's part in connecting a group: dials the ranks before it, and accepts the connections of those after
    it."""

    def __init__(
        self,
        uses: Sequence[str],
        name: str,
        meet: Meet,
        world: World,
        ranks: Sequence[int],
        config: Config,
        star: bool,
        kept: Mapping[int, KeptLink],
    ) -> None:
        self.place = ranks.index(world.rank)
        self._others = [0] if star and self.place > 0 else [at for at in range(len(ranks)) if at != self.place]
        """Indices of the ranks to connect with."""
        self.kept = kept
        self.addresses: list[str] = []
        self._uses, self._name, self._meet, self._ranks = uses, name, meet, ranks
        self._is_whole = len(ranks) == world.world_size
        self._me = f"rank {world.rank}"
        self._silence, self._timeout = config.timeout, config.start_timeout
        self._mended_silence = silence_of(config)
        self.mender: Mender | None = None
        self._streams, self._verbose = config.streams, config.verbose
        self._found: dict[tuple[str, int], dict[int, socket.socket]] = {}
        """The connections made so far, keyed first by use and the other rank's index, and then by the connection's
        number."""
        self._counts: dict[tuple[str, int], int] = {}
        """Number of connections that the dialling rank has chosen to make, by use and the other rank's index."""
        self._errors: list[StartTimeout] = []
        self._news = threading.Condition()
        self._address = world.address or "127.0.0.1"
        # If the job has no secret, anyone who sees what ranks exchange at the start may connect.
        self._key = meet.secret or secrets.token_bytes(KEY_BYTES)
        self._listener = Listener(self._key, self._silence, self._greet, self._take, address=self._address)

    def __enter__(self) -> _Entry:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            self._listener.close()
            with self._news:
                for numbered in self._found.values():
                    for each in numbered.values():
                        each.close()

    def connect(self, deadline: float) -> dict[tuple[str, int], dict[int, socket.socket]]:
        key = b"" if self._meet.secret else self._key
        reach = Reach(addresses=[self._address], port=self._listener.port, key=key, silence=self._silence)
        kept = sum(1 << place for place in self.kept)
        endpoints = self._exchange(json.dumps([reach.to_text(), f"{kept:x}"]).encode())
        told = [self._told(place, blob) for place, blob in enumerate(endpoints)]
        reaches = [reach for reach, _ in told]
        self.addresses = [reach.addresses[0] for reach in reaches]
        self.kept = {place: link for place, link in self.kept.items() if told[place][1] >> self.place & 1}
        self._others = [place for place in self._others if place not in self.kept]
        self.mender = Mender(self.place, self._name, self._ranks, reaches, self._listener, self._silence)
        _at_once([partial(self._dial, place, reaches[place], deadline) for place in self._others if place < self.place])
        if self._errors:
            raise self._errors[0]
        wanted = {(use, place) for use in self._uses for place in self._others}

        def missing() -> set[int]:
            return {
                place
                for use, place in wanted
                if len(self._found.get((use, place), {})) != self._counts.get((use, place))
            }

        with self._news:
            if not self._news.wait_for(lambda: not missing(), max(0.0, deadline - monotonic())):
                late = sorted(self._ranks[place] for place in missing())
                raise StartTimeout(f"{ranked(late)} did not connect to {self._me} by TCP within {self._timeout:g} s")
        return self._found

    def _exchange(self, blob: bytes) -> list[bytes]:
        if self._is_whole:
            return self._meet.exchange(f"{self._name} endpoints", blob)
        keys = [f"{self._name} endpoint {rank}" for rank in self._ranks]
        self._meet.put(keys[self.place], blob)
        return self._meet.get(keys)

    def _told(self, place: int, blob: bytes) -> tuple[Reach, int]:
        """Return where a rank listens, and the set of ranks, as bits, with which it has connections that stand."""
        try:
            text, kept = json.loads(blob)
            reach = Reach.from_text(text)
            return replace(reach, key=self._meet.secret or reach.key), int(kept, 16)
        except (ValueError, TypeError) as error:
            raise StartTimeout(f"rank {self._ranks[place]} told as address what is none of this version's") from error

    def _dial(self, place: int, reach: Reach, deadline: float) -> None:
        other = f"rank {self._ranks[place]}"

        def dialled(use: str, count: int) -> list[socket.socket]:
            found: dict[int, socket.socket] = {}
            errors: list[Exception] = []

            def one(number: int) -> None:
                hello = {"use": use, "place": self.place, "group": self._name, "number": number, "count": count}
                try:
                    found[number] = dial(lambda: reach, hello, deadline, other)[0].socket
                except (Refused, Unreached) as error:
                    errors.append(error)

            _at_once([partial(one, number) for number in range(count)])
            if errors:
                for each in found.values():
                    each.close()
                raise errors[0]
            return _in_order(found)

        def wanted(known: socket.socket) -> int:
            """Return how many data connections to make with the other rank. known: a connection that already exists
            with it."""
            seconds = streams.round_trip(known)
            if self._streams or not streams.is_far(seconds):
                return self._streams or 1
            probes = dialled(_PROBE, streams.PROBES)
            try:
                rate = streams.measure(probes, seconds)
            finally:
                for each in probes:
                    streams.drop(each)
            count = streams.count(rate, seconds)
            if self._verbose:
                link = f"{8e-6 * rate:.3g} Mbit/s, {1e3 * seconds:.3g} ms"
                self._meet.say(f"{self._me} has {count} TCP connections with {other} for data ({link})")
            return count

        def connect(use: str, count: Callable[[], int]) -> list[socket.socket]:
            sockets: list[socket.socket] = []
            try:
                sockets = dialled(use, count())
                for number, each in enumerate(sockets):
                    self._put(use, place, number, len(sockets), each)
            except (Refused, Unreached) as error:
                text = f"{self._me} does not reach {other} by TCP ({error}) -> open the firewall between the hosts"
                self._errors.append(StartTimeout(text))
            return sockets

        first, *further = self._uses
        if known := connect(first, lambda: 1):
            counts = {DATA: lambda: wanted(known[0])}
            _at_once([partial(connect, use, counts.get(use, lambda: 1)) for use in further])

    def _greet(self, hello: Words) -> Words:
        if self.mender is not None and hello.get("use") in mending.USES:
            return self.mender.greet(hello)
        use, place, number, count = (hello.get(word, "") for word in ("use", "place", "number", "count"))
        right = hello.get("group") == self._name and use in (*self._uses, _PROBE)
        right = right and isinstance(place, int) and place > self.place and place in self._others
        right = right and isinstance(number, int) and isinstance(count, int) and 0 <= number < count <= MOST_STREAMS
        if not right or number in self._found.get((use, place), {}):
            return {"refused": f"{self._me} awaits another connection"}
        return {}

    def _take(self, hello: Words, connection: SealedConnection) -> None:
        if self.mender is not None and hello["use"] in mending.USES:
            self.mender.take(hello, connection)
        elif hello["use"] == _PROBE:
            streams.drain(connection.socket, self._silence)
        else:
            self._put(hello["use"], hello["place"], hello["number"], hello["count"], connection.socket)

    def _put(self, use: str, place: int, number: int, count: int, connection: socket.socket) -> None:
        guard(connection, self._mended_silence)
        set_urgent(connection, use != DATA)
        with self._news:
            self._found.setdefault((use, place), {})[number] = connection
            self._counts[use, place] = count
            self._news.notify()


def _at_once(calls: Sequence[Callable[[], object]]) -> None:
    """Run the calls at the same time, and wait for all of them. They must not raise."""
    # These threads are not from a pool: pools refuse work while the interpreter exits, when ranks may still have to
    # reconnect.
    threads = [threading.Thread(target=call, name="dadt-dial", daemon=True) for call in calls[1:]]
    for each in threads:
        each.start()
    for call in calls[:1]:
        call()
    for each in threads:
        each.join()
