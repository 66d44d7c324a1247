"""TCP connections between the ranks of a group, over which both ends have proved that they belong to the job before
anything else is read."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import monotonic

from dadt.comm.executors.meet import Meet
from dadt.config import Config
from dadt.config.link import pace_of
from dadt.control.connection import Listener, Reach, Refused, SealedConnection, Unreached, Words, dial
from dadt.control.pacing import paced
from dadt.errors import StartTimeout
from dadt.world import World, ranked

KEY_BYTES = 32


def connect(
    uses: Sequence[str], name: str, meet: Meet, world: World, ranks: Sequence[int], config: Config
) -> Mapping[str, list[socket.socket | None]]:
    """Connect these ranks of the world with each other. Returns, for each use, the sockets by place in `ranks`, None at
    this rank's own.

    uses: what the connections are for, one connection each between two ranks. name: prefix of the group's keys in the
    rendezvous. Raises StartTimeout, naming the ranks that are not reached in time.
    """
    if len(ranks) == 1:
        return {use: [None] for use in uses}
    # A rank sends to all others at once, and its link is one.
    with paced(pace_of(config.link) / (len(ranks) - 1)), _Entry(uses, name, meet, world, ranks, config) as entry:
        found = entry.connect(monotonic() + config.start_timeout)
    return {use: [found.get((use, place)) for place in range(len(ranks))] for use in uses}


class _Entry:
    """One rank's listening socket while the ranks connect. A rank dials those before it and is dialled by the rest."""

    def __init__(
        self, uses: Sequence[str], name: str, meet: Meet, world: World, ranks: Sequence[int], config: Config
    ) -> None:
        self.place = ranks.index(world.rank)
        self._uses, self._name, self._meet, self._ranks = uses, name, meet, ranks
        self._me = f"rank {world.rank}"
        self._silence, self._timeout = config.timeout, config.start_timeout
        self._found: dict[tuple[str, int], socket.socket] = {}
        self._errors: list[StartTimeout] = []
        self._news = threading.Condition()
        self._address = world.address or "127.0.0.1"
        # Without a secret of the job, whoever sees what the ranks tell each other at the start may connect.
        self._key = meet.secret or secrets.token_bytes(KEY_BYTES)
        self._listener = Listener(self._key, self._silence, self._greet, self._take, address=self._address)

    def __enter__(self) -> _Entry:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._listener.close()
        if kind is not None:
            with self._news:
                for each in self._found.values():
                    each.close()

    def connect(self, deadline: float) -> dict[tuple[str, int], socket.socket]:
        key = b"" if self._meet.secret else self._key
        reach = Reach(addresses=[self._address], port=self._listener.port, key=key, silence=self._silence)
        self._meet.put(self._endpoint(self._ranks[self.place]), reach.to_text().encode())
        endpoints = self._meet.get([self._endpoint(rank) for rank in self._ranks])
        reaches = [self._reach(place, blob) for place, blob in enumerate(endpoints)]
        # no pool, as pools refuse work once the interpreter ends, which is when ranks may still connect anew
        dials = [
            threading.Thread(target=self._dial, args=(place, reaches[place], deadline), name="dadt-dial", daemon=True)
            for place in range(self.place)
        ]
        for each in dials:
            each.start()
        for each in dials:
            each.join()
        if self._errors:
            raise self._errors[0]
        wanted = {(use, place) for use in self._uses for place in range(len(self._ranks)) if place != self.place}
        with self._news:
            if not self._news.wait_for(lambda: self._found.keys() >= wanted, max(0.0, deadline - monotonic())):
                missing = sorted({self._ranks[place] for _, place in wanted - self._found.keys()})
                raise StartTimeout(f"{ranked(missing)} did not connect to {self._me} by TCP within {self._timeout:g} s")
        return self._found

    def _endpoint(self, rank: int) -> str:
        return f"{self._name} endpoint {rank}"

    def _reach(self, place: int, blob: bytes) -> Reach:
        try:
            reach = Reach.from_text(blob.decode())
        except ValueError as error:
            raise StartTimeout(f"rank {self._ranks[place]} told as address what is none of this version's") from error
        return replace(reach, key=self._meet.secret or reach.key)

    def _dial(self, place: int, reach: Reach, deadline: float) -> None:
        other = f"rank {self._ranks[place]}"
        try:
            for use in self._uses:
                hello = {"use": use, "place": self.place, "group": self._name}
                connection, _, _ = dial(lambda: reach, hello, deadline, other)
                self._put(use, place, connection.socket)
        except (Refused, Unreached) as error:
            text = f"{self._me} does not reach {other} by TCP ({error}) -> open the firewall between the hosts"
            self._errors.append(StartTimeout(text))

    def _greet(self, hello: Words) -> Words:
        use, place = hello.get("use"), hello.get("place")
        right = hello.get("group") == self._name and use in self._uses
        later = isinstance(place, int) and self.place < place < len(self._ranks)
        if not right or not later or (use, place) in self._found:
            return {"refused": f"{self._me} awaits another connection"}
        return {}

    def _take(self, hello: Words, connection: SealedConnection) -> None:
        self._put(hello["use"], hello["place"], connection.socket)

    def _put(self, use: str, place: int, connection: socket.socket) -> None:
        with self._news:
            self._found[use, place] = connection
            self._news.notify()
