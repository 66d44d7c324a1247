"""Whether those that a library has connected are the job's ranks. Libraries take whoever comes to their ports.

Over its connection with each peer a rank sends a number that it has drawn, and answers the peer's by a MAC under the
job's secret. Nothing that comes over the connection is used before that.
"""

from __future__ import annotations

import hashlib
import hmac
import queue
import secrets
import struct
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dadt.errors import PeerLost, StartTimeout, Unproved

if TYPE_CHECKING:
    from dadt.executors.base import Executor

BYTES = 32
_LABEL = b"dadt: a rank of a group\0"
_PAIR = struct.Struct(">II")
_END_SECONDS = 5.0
_TITLES = {"gloo": "Gloo", "nccl": "NCCL", "mpi": "MPI", "ucc": "UCC"}


def prove(
    executor: Executor, secret: bytes, rank: int, ranks: Sequence[int], library: str, name: str, timeout: float
) -> None:
    """Every rank of a group does it first. Ends the executor where it fails.

    rank: this one's place among `ranks`, which are named in errors. library, name: of the group. Raises Unproved,
    StartTimeout after `timeout` seconds, and PeerLost, all of which name ranks. Without a secret nothing happens.
    """
    if not secret or len(ranks) == 1:
        return
    title = _TITLES.get(library, library)
    nonce = secrets.token_bytes(BYTES)
    places = range(len(ranks))

    def answer(of: int, to: int, nonces: tuple[bytes, bytes]) -> bytes:
        return hmac.digest(secret, _LABEL + _PAIR.pack(of, to) + b"".join(nonces) + name.encode(), hashlib.sha256)

    try:
        nonces = _exchanged(executor, [nonce for _ in places], rank, ranks, title, timeout)
        mine = [answer(rank, place, (nonce, nonces[place])) for place in places]
        theirs = _exchanged(executor, mine, rank, ranks, title, timeout)
        expected = [answer(place, rank, (nonces[place], nonce)) for place in places]
        false = [ranks[p] for p in places if p != rank and not hmac.compare_digest(theirs[p], expected[p])]
        if false:
            raise Unproved(
                f"{_named(false)} of the {title} group did not prove that it belongs to this job: something else "
                "answered on its port, or called in its place; see docs/security.md"
            )
    except BaseException:
        executor.abort()
        executor.close()
        raise


def _exchanged(
    executor: Executor, blobs: Sequence[bytes], rank: int, ranks: Sequence[int], title: str, timeout: float
) -> list[bytes]:
    """What each rank has sent to this one. Directly: what goes round a ring says nothing of the other connections."""
    sends = [torch.frombuffer(bytearray(blob), dtype=torch.uint8) for blob in blobs]
    receives = [torch.zeros(BYTES, dtype=torch.uint8, device="cpu") for _ in blobs]
    ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            executor.exchange(sends, receives)
        except Exception as error:  # noqa: BLE001 (whatever the library raises, told below)
            ended.put(error)
        else:
            ended.put(None)

    # Libraries wait as long as training does.
    thread = threading.Thread(target=run, name="dadt-proof", daemon=True)
    thread.start()
    try:
        error = ended.get(timeout=timeout)
    except queue.Empty:
        silent = [ranks[place] for place, got in enumerate(receives) if place != rank and not got.any()]
        executor.abort()
        thread.join(_END_SECONDS)
        raise StartTimeout(
            f"{_named(silent)} of the {title} group did not prove within {timeout:g} s that it belongs to this job: "
            "it has stopped, or something else answered on its port; see docs/security.md"
        ) from None
    if error is not None:
        raise PeerLost(
            f"the {title} group broke while its ranks proved that they belong to this job: {error}"
        ) from error
    return [bytes(got.numpy()) for got in receives]


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "each of ranks ") + ", ".join(map(str, ranks))
