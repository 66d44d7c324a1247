"""Rendezvous of a process group's ranks through the store that torch passes in; also records in which call each rank
waits, for error texts."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from dadt.comm.executors.meet import Meet
from dadt.comm.rendezvous import store, store_client
from dadt.comm.rendezvous.store_client import polled
from dadt.control import machine
from dadt.errors import StartTimeout
from dadt.world import World, ranked

ROLL_CALL_SECONDS = 1.0
"""Seconds that a rank, after its own wait timed out, allows other ranks to report in which call they wait."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Hosts and GPUs that the ranks of a process group use."""

    world: World
    """This rank's place among the group's ranks, which are numbered from 0 within the group."""
    workers: list[int]
    """Number of the group's ranks on each host, as a list with one entry per host."""
    gpu_each: bool
    """Whether NCCL is available and every rank of the group has a GPU of its own."""


class GroupRendezvous(Meet):
    """One rank's view of the rendezvous of a process group. The ranks share no secret, since every process that can
    reach the script's own store counts as a rank of the group. timeout: seconds within which all ranks must join."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        # A later group of the same name must not read values that an earlier group left in the store.
        self._turn = store.add(f"turn/{rank}", 1)

    def exchange(self, key: str, blob: bytes) -> list[bytes]:
        """Publish this rank's `blob` and return every rank's, ordered by rank. Each key may be used once. Raises
        StartTimeout naming the ranks that do not join."""
        keys = [self._key(key, rank) for rank in range(self._size)]
        self._store.set(keys[self._rank], blob)  # type: ignore[arg-type]  # takes bytes, too

        def joined(missing: Sequence[str]) -> str:
            return f"{ranked([keys.index(each) for each in missing])} did not join the process group"

        self._await(keys, joined)
        return [self._store.get(each) for each in keys]

    def _await(self, keys: Sequence[str], blame: Callable[[Sequence[str]], str]) -> None:
        """Wait until all keys are in the store. blame: returns the error text for the keys that are missing. Raises
        StartTimeout."""
        # Poll, because the store's own wait() prints a warning whenever it times out.
        if not polled(lambda: self._store.check(list(keys)), self._timeout):
            missing = [each for each in keys if not self._store.check([each])]
            raise StartTimeout(f"{blame(missing)} within {self._timeout:g} s")

    def put(self, key: str, blob: bytes) -> None:
        """Publish a value under `key`; any rank may read the value with get()."""
        self._store.set(self._key(f"put/{key}", 0), blob)  # type: ignore[arg-type]  # takes bytes, too

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for the values that any ranks publish with put() under `keys`, and return them. Raises StartTimeout."""
        put = [self._key(f"put/{key}", 0) for key in keys]
        self._await(put, lambda missing: f"no rank did its part for {missing[0]!r}")
        return [self._store.get(each) for each in put]

    def look_around(self) -> Surroundings:
        """Find out on which machines and GPUs the group's ranks run, from what each rank reports about itself."""
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
        """Publish that this rank waits in its call number `call`, so that other ranks can name the missing ranks in
        errors."""
        try:
            self._store.set(self._key("waits", self._rank), str(call))
        except RuntimeError:
            pass  # the rank that serves the store has ended; waiting ranks get this error from the executor

    def absent(self, call: int) -> list[int]:
        """Return the ranks that have not reported, within ROLL_CALL_SECONDS, a wait in call number `call` or a later
        one. Returns an empty list if the store is unreachable."""

        def missing() -> list[int]:
            return [rank for rank in range(self._size) if self._last(rank) < call]

        try:
            return [] if polled(lambda: not missing(), ROLL_CALL_SECONDS) else missing()
        except RuntimeError:  # raised if the rank that serves the store has ended
            return []

    def _last(self, rank: int) -> int:
        key = self._key("waits", rank)
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _key(self, key: str, rank: int) -> str:
        return f"{self._turn}/{key}/{rank}"


def _ends(c10d: Any) -> tuple[str, str]:
    """Return this host's address on the route to the store, and the address of the store's host, which is empty if the
    store is a file."""
    while hasattr(c10d, "underlying_store"):
        c10d = c10d.underlying_store
    if not hasattr(c10d, "host"):
        return World.from_env().address, ""
    return store.ends(c10d.host, c10d.port)


def _address(everyone: Sequence[dict[str, str]], rank: int) -> str:
    """Return the address at which other hosts reach this rank's host."""
    own = everyone[rank]["own"]
    if own and not ipaddress.ip_address(own).is_loopback:
        return own
    # The rank's host is the store's host, which may know itself only by its loopback address; other hosts connected to
    # it under a usable one.
    return next((each["store"] for each in everyone if each["machine"] != everyone[rank]["machine"]), own)
