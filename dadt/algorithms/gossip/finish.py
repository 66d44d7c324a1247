"""The one wait of ranks for each other that go each at its own speed: at the end of the process."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

import torch

from dadt.errors import CommError, CommTimeout

if TYPE_CHECKING:
    from dadt.comm.executors.base import P2PWork
    from dadt.train.peers import Peers

_PATIENCE = 3.0
"""Seconds of waiting after which a rank looks how far its peers are."""


def await_all(runtime: Peers, tag: int) -> None:
    """Wait until all ranks have come here, for as long as any of them makes steps.

    Over mail, not the engine: an operation of that has a deadline from its first rank on. Raises CommTimeout that says
    where each rank is, PeerLost.
    """
    mail, group = runtime.mail, runtime.group
    runtime.reconnection.check()  # a note that has come on a new connection comes once only
    note = torch.zeros(group.world_size, dtype=torch.int64, device="cpu")
    if group.rank:
        transits = [mail.send(note[:1], 0, tag), mail.receive(note[1:2], 0, tag)]
        _wait(runtime, transits)
        return
    peers = range(1, group.world_size)
    _wait(runtime, [mail.receive(note[peer : peer + 1], peer, tag) for peer in peers])
    _wait(runtime, [mail.send(note[:1], peer, tag) for peer in peers])


def _wait(runtime: Peers, transits: list[P2PWork]) -> None:
    config = runtime.config
    known = _peers(runtime)
    begun = moved = monotonic()
    told = False
    for transit in transits:
        while not _done(runtime, transit):
            now, peers = monotonic(), _peers(runtime)
            if [said for _, said, _ in peers] != [said for _, said, _ in known]:
                moved = now
            known = peers
            who = ", ".join(f"rank {rank} {state}" for rank, _, state in known if rank != runtime.world.rank)
            if now - moved > config.timeout:
                raise CommTimeout(f"waited {now - moved:.0f} s at the end: {who or 'a peer did not come'}")
            if now - begun > config.stall_warning and not told:
                told = True
                runtime.say(f"rank {runtime.world.rank} has ended and waits for the others: {who}", level="warning")


def _done(runtime: Peers, transit: P2PWork) -> bool:
    try:
        transit.wait(_PATIENCE)
    except CommTimeout:
        if (error := runtime.engine.error) is not None:
            raise CommError(error) from None
        if not transit.done:
            return False
        transit.wait(0.0)  # its own error, or it has come just now
    return True


def _peers(runtime: Peers) -> list[tuple[int, str, str]]:
    """Each rank, how far it is by its own report, and that as a text for the user, with what the kernel says of it."""
    return [(p["rank"], f"{p['said']}", f"{p['state']}") for p in runtime.control.peers()] if runtime.control else []
