"""Exchanges bytes and Python objects between ranks.

Objects are pickled, since a script may send any type; reading a pickle runs code that the sender chose. Pickles
therefore travel only within a process set whose ranks have proved to each other that they know the job's secret.
Training itself sends no pickles.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from dadt.comm.collectives.operation import Operation
from dadt.comm.collectives.process_set import ProcessSet
from dadt.errors import DadtError


def gather_bytes(among: ProcessSet, data: bytes, name: str) -> list[bytes]:
    """Return every rank's bytes, ordered by rank within the set. Lengths may differ."""
    mine = _bytes(data)
    call = Operation("all_gather", "all_gather bytes", "exchange", keep=[mine])
    call.sends = [(mine.data_ptr(), len(data))] * among.size
    call.finish = lambda work: [bytes(memory) for memory in work.received]
    received: list[bytes] = among.submit(call, name).wait()
    return received


def broadcast_bytes(among: ProcessSet, data: bytes, root: int, name: str) -> bytes:
    """Return the root's bytes on all ranks. root: the root's number within the set. Other ranks' `data` is ignored."""
    mine = _bytes(data if among.rank == root else b"")
    call = Operation("broadcast", f"broadcast of bytes from rank {root}", "exchange", keep=[mine])
    call.sends = [(mine.data_ptr(), mine.numel()) if among.rank == root else (0, 0)] * among.size
    call.finish = lambda work: bytes(work.received[root])
    received: bytes = among.submit(call, name).wait()
    return received


def broadcast_object(among: ProcessSet, value: Any, root: int, name: str) -> Any:
    """Return the root's object on all ranks. Raises DadtError if the ranks of the set have no common secret, or if the
    root cannot pickle the object."""
    _check(among)
    data, error = _dumped(value) if among.rank == root else (b"", None)
    received = broadcast_bytes(among, data, root, name)
    if error is not None:
        raise error
    return value if among.rank == root else _loaded(received, among.ranks[root])


def allgather_object(among: ProcessSet, value: Any, name: str) -> list[Any]:
    """Return every rank's object, ordered by rank within the set. Raises DadtError if the ranks of the set have no
    common secret, or if a rank cannot pickle its object."""
    _check(among)
    mine, error = _dumped(value)
    every = gather_bytes(among, mine, name)
    if error is not None:
        raise error
    return [_loaded(data, rank) for data, rank in zip(every, among.ranks, strict=True)]


def _dumped(value: Any) -> tuple[bytes, Exception | None]:
    """Pickle the value. If this fails, returns empty bytes and the error, so that the rank still takes part in the
    collective and other ranks do not wait for it."""
    import cloudpickle  # type: ignore[import-untyped]

    try:
        return cloudpickle.dumps(value), None
    except Exception as error:  # noqa: BLE001 (a user's class may raise anything)
        return b"", error


def _loaded(data: bytes, rank: int) -> Any:
    if not data:
        raise DadtError(f"rank {rank} could not pickle its object: see its own error")
    return pickle.loads(data)


def _check(among: ProcessSet) -> None:
    """Raise DadtError if the ranks of the set had no common secret by which to prove that they belong to the job."""
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
