"""Ranks of a process group find each other, and tell who waits for whom, through the store that torch hands over."""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dadt.comm.rendezvous import store, store_client
from dadt.control import machine
from dadt.errors import StartTimeout
from dadt.world import World

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

PAUSES = (0.001, 0.05)
"""Seconds between looks for what other ranks put into the store: they grow from the first to the second."""
ROLL_CALL_SECONDS = 1.0
"""Seconds that a rank, once its own wait has timed out, gives the others to say where they are."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where the ranks of a group run."""

    world: World
    """This rank's place among the group's ranks, which are numbered from 0 within the group."""
    workers: list[int]
    """Number of the group's ranks on each host."""
    gpu_each: bool
    """Whether every rank has a GPU of its own to use, and NCCL."""


class GroupRendezvous:
    """One rank's side. timeout: seconds within which all ranks come."""

    outdated = None

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        # A group that is made anew under the same name must not find what the one before has left.
        self._turn = store.add(f"turn/{rank}", 1)

    def look(self, what: str, waited: float) -> None:
        """Nobody counts who waits."""

    def exchange(self, key: str, blob: bytes) -> list[bytes]:
        """Every rank's blob, by rank; each key once. Raises StartTimeout naming the ranks that do not come."""
        keys = [self._key(key, rank) for rank in range(self._size)]
        self._store.set(keys[self._rank], blob)  # type: ignore[arg-type]  # takes bytes, too

        def joined(missing: Sequence[str]) -> str:
            return f"{ranks([keys.index(each) for each in missing])} did not join the process group"

        self._await(keys, joined)
        return [self._store.get(each) for each in keys]

    def _await(self, keys: Sequence[str], blame: Callable[[Sequence[str]], str]) -> None:
        """blame: says of missing keys what has not happened."""
        deadline = time.monotonic() + self._timeout
        pause = PAUSES[0]
        # By looking: the store's own wait prints a warning whenever its time is over.
        while not self._store.check(list(keys)):
            if time.monotonic() >= deadline:
                missing = [each for each in keys if not self._store.check([each])]
                raise StartTimeout(f"{blame(missing)} within {self._timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, PAUSES[1])

    @property
    def secret(self) -> bytes:
        """Always empty: whoever can reach the script's store counts as a rank of the group."""
        return b""

    def put(self, key: str, blob: bytes) -> None:
        """Give a value to whichever rank asks for the key."""
        self._store.set(self._key(f"put/{key}", 0), blob)  # type: ignore[arg-type]  # takes bytes, too

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values that some ranks have put there, or will put there. Raises StartTimeout."""
        put = [self._key(f"put/{key}", 0) for key in keys]
        self._await(put, lambda missing: f"no rank did its part for {missing[0]!r}")
        return [self._store.get(each) for each in put]

    def look_around(self) -> Surroundings:
        """The machines of the ranks, as the ranks themselves see them."""
        own, server = _ends(self._store)
        gpus = machine.gpus() if dist.is_nccl_available() and torch.cuda.is_available() else []
        mine = {"machine": store_client.machine_id(), "own": own, "store": server, "gpus": gpus}
        everyone = [json.loads(blob) for blob in self.exchange("machine", json.dumps(mine).encode())]
        world = store_client.placed(
            World(rank=self._rank, world_size=self._size), everyone, _address(everyone, self._rank)
        )
        hosts: dict[str, list[list[str]]] = {}
        for each in everyone:
            hosts.setdefault(each["machine"], []).append(each["gpus"])
        return Surroundings(
            world=world,
            workers=[len(of_ranks) for of_ranks in hosts.values()],
            gpu_each=all(len(set().union(*of_ranks)) >= len(of_ranks) for of_ranks in hosts.values()),
        )

    def wait_in(self, call: int) -> None:
        """Tell the other ranks that this rank waits in its call number `call`."""
        try:
            self._store.set(self._key("waits", self._rank), str(call))
        except RuntimeError:
            pass  # the store is gone with the rank that serves it; who waits learns that from the executor

    def absent(self, call: int) -> list[int]:
        """The ranks that have not reported, within ROLL_CALL_SECONDS, that they wait in this call or a later one; none
        if the store is gone."""
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        pause = PAUSES[0]
        try:
            while (missing := [r for r in range(self._size) if self._last(r) < call]) and time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(2 * pause, PAUSES[1])
        except RuntimeError:  # the store is gone, and with it the rank that serves it
            return []
        return missing

    def _last(self, rank: int) -> int:
        key = self._key("waits", rank)
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _key(self, key: str, rank: int) -> str:
        return f"{self._turn}/{key}/{rank}"


def ranks(numbers: Sequence[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def _ends(c10d: Any) -> tuple[str, str]:
    """The addresses of this host and of the store's host on the way between them; empty if the store is a file."""
    while hasattr(c10d, "underlying_store"):
        c10d = c10d.underlying_store
    if not hasattr(c10d, "host"):
        return World.from_env().address, ""
    return store.ends(c10d.host, c10d.port)


def _address(everyone: Sequence[dict[str, str]], rank: int) -> str:
    """The address at which other hosts reach this rank's host."""
    own = everyone[rank]["own"]
    if own and not ipaddress.ip_address(own).is_loopback:
        return own
    # The store's own host, which may name itself by its loopback: others know it by another name.
    return next((each["store"] for each in everyone if each["machine"] != everyone[rank]["machine"]), own)
