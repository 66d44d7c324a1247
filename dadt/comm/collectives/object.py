"""Bytes and objects of Python's between ranks.

Objects are pickled, since a script may send whatever it has; whoever sends a pickle runs code where it is read. So they
travel only on the connection of a process set, whose ranks have proved the job's secret to each other before its first
use, and no training goes this way: what its ranks tell each other is plain.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch

from dadt.comm.collectives.operation import Operation
from dadt.errors import DadtError

if TYPE_CHECKING:
    from dadt.comm.collectives.process_set import ProcessSet


def gather_bytes(among: ProcessSet, data: bytes, name: str) -> list[bytes]:
    """Every rank's bytes, of any lengths, by rank of the set."""
    mine = _bytes(data)
    call = Operation("all_gather", "all_gather bytes", "exchange", keep=[mine])
    call.sends = [(mine.data_ptr(), len(data))] * among.size
    call.finish = lambda work: [bytes(memory) for memory in work.received]
    received: list[bytes] = among.submit(call, name).wait()
    return received


def broadcast_bytes(among: ProcessSet, data: bytes, root: int, name: str) -> bytes:
    """The bytes of the root (its number within the set), of any length."""
    mine = _bytes(data if among.rank == root else b"")
    call = Operation("broadcast", f"broadcast of bytes from rank {root}", "exchange", keep=[mine])
    call.sends = [(mine.data_ptr(), mine.numel()) if among.rank == root else (0, 0)] * among.size
    call.finish = lambda work: bytes(work.received[root])
    received: bytes = among.submit(call, name).wait()
    return received


def broadcast_object(among: ProcessSet, value: Any, root: int, name: str) -> Any:
    """The root's object on all ranks."""
    _check(among)
    data = pickle.dumps(value) if among.rank == root else b""
    received = broadcast_bytes(among, data, root, name)
    return value if among.rank == root else pickle.loads(received)


def allgather_object(among: ProcessSet, value: Any, name: str) -> list[Any]:
    """Every rank's object, by rank of the set."""
    _check(among)
    return [pickle.loads(data) for data in gather_bytes(among, pickle.dumps(value), name)]


def _check(among: ProcessSet) -> None:
    """Raises DadtError where the ranks had no secret to prove."""
    if not among.proved:
        raise DadtError(
            "objects travel as pickles, which run code where they are read, and the ranks of this job met without a "
            "secret -> export the same DADT_SECRET for all ranks (openssl rand -hex 32 makes one), or start them with "
            "`dadt run`"
        )


def _bytes(data: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
