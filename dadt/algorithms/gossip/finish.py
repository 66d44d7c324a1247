"""The final barrier of `gossip`, whose ranks train at different speeds and wait for each other only at this barrier."""

from __future__ import annotations

from time import monotonic

import torch

from dadt.algorithms.gossip.edge import done_within
from dadt.comm.executors.base import P2PWork
from dadt.errors import CommError, CommTimeout
from dadt.train.ranks import Ranks

_PATIENCE = 3.0
"""Seconds of waiting in the final barrier after which a rank finds out how many steps its peers have made."""


def await_all(ranks: Ranks, tag: int) -> None:
    """Wait until all ranks have called this function. There is no time limit while any rank still makes steps.

    Uses point-to-point messages, because a collective operation would time out after its first rank arrives. Raises
    PeerLost, or CommTimeout, which says where each rank is.
    """
    mail, group = ranks.mail, ranks.group
    # This raises PeerLost if ranks have reconnected, because a peer's message for this barrier that has already arrived
    # over the new connection is not sent again.
    ranks.reconnection.check()
    note = torch.zeros(group.world_size, dtype=torch.int64, device="cpu")
    if group.rank:
        transits = [mail.send(note[:1], 0, tag), mail.receive(note[1:2], 0, tag)]
        _wait(ranks, transits)
        return
    peers = range(1, group.world_size)
    _wait(ranks, [mail.receive(note[peer : peer + 1], peer, tag) for peer in peers])
    _wait(ranks, [mail.send(note[:1], peer, tag) for peer in peers])


def _wait(ranks: Ranks, transits: list[P2PWork]) -> None:
    config = ranks.config
    known = _peers(ranks)
    begun = moved = monotonic()
    told = False
    for transit in transits:
        while not _done(ranks, transit):
            now, peers = monotonic(), _peers(ranks)
            if [said for _, said, _ in peers] != [said for _, said, _ in known]:
                moved = now
            known = peers
            who = ", ".join(f"rank {rank} {state}" for rank, _, state in known if rank != ranks.world.rank)
            if now - moved > config.timeout:
                raise CommTimeout(f"waited {now - moved:.0f} s at the end: {who or 'a peer did not come'}")
            if now - begun > config.stall_warning and not told:
                told = True
                ranks.say(f"rank {ranks.world.rank} has ended and waits for the others: {who}", level="warning")


def _done(ranks: Ranks, transit: P2PWork) -> bool:
    if done_within(transit, _PATIENCE):
        return True
    if (error := ranks.engine.error) is not None:
        raise CommError(error)
    return False


def _peers(ranks: Ranks) -> list[tuple[int, str, str]]:
    """Return for each rank its number, its reported progress, and a text for the user with its progress and state in
    the kernel."""
    return [(p["rank"], f"{p['said']}", f"{p['state']}") for p in ranks.control.peers()] if ranks.control else []
