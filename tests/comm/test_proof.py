"""Groups that libraries connect, and strangers among them: over a store in each process, and each rank's proof."""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.patience import PATIENCE
from harness.ranks import printed
from torch.distributed import FileStore

from dadt.comm.backend.rendezvous import GroupRendezvous
from dadt.comm.executors import c10d, hierarchical, proof
from dadt.comm.executors.keys import Keys
from dadt.config import Config
from dadt.control.schema import WORKER
from dadt.errors import DadtError
from dadt.world import World

SECRET = b"of the job"


class Keyed(GroupRendezvous):
    """Of ranks that have a secret."""

    secret = SECRET


class Counting(Keyed):
    """Says how often it was asked."""

    asked = 0

    def get(self, keys: Any) -> list[bytes]:
        self.asked += 1
        return super().get(keys)


def meet_of(kind: type[GroupRendezvous], folder: str, rank: int, size: int) -> GroupRendezvous:
    return kind(FileStore(f"{folder}/store", size), rank, size, PATIENCE)


def world_of(rank: int, size: int, local_size: int) -> World:
    host = rank // local_size
    return World(rank=rank, world_size=size, local_rank=rank % local_size, local_size=local_size, cross_rank=host)


def train(rank: int, size: int, local_size: int, folder: str, cross: str) -> None:
    """One sum over groups that have proved themselves, and what the process listens at and costs meanwhile."""
    torch.set_num_threads(1)
    meet = meet_of(Counting, folder, rank, size)
    config = Config(timeout=PATIENCE, start_timeout=PATIENCE)
    world = world_of(rank, size, local_size)
    connect: Callable[..., Any] = hierarchical.connect if cross else c10d.connect
    connection = connect(cross or "gloo", config, world, meet)
    assert meet.asked <= 2, "all keys of a group come at once"
    assert connection.engine.allgather(b"%d" % rank, "all").wait(PATIENCE) is None
    meet.exchange("sat", b"")
    used = time.process_time()
    threading.Event().wait(0.5)
    assert time.process_time() - used < 0.2, "no thread spins"
    threads = {each.name for each in threading.enumerate()}
    assert "dadt-proof" not in threads
    meet.exchange("end", b"")
    connection.engine.close(PATIENCE)
    connection.close()
    print("right")


@pytest.mark.parametrize(
    ("size", "local_size", "cross"), [(4, 4, ""), (4, 2, "gloo"), (2, 1, "gloo")], ids=["gloo", "2x2", "1x1"]
)
def test_ranks_find_and_prove_each_other(tmp_path: Path, size: int, local_size: int, cross: str) -> None:
    ranks = [(rank, size, local_size, str(tmp_path), cross) for rank in range(size)]
    assert [each.said for each in printed(tmp_path, train, *ranks)] == ["right\n"] * size


class Run:
    """What a stranger would have read."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def answer_nothing(group: Any) -> None:
    """Until the others have gone."""
    for rank in (0, 1):
        try:
            group.recv([torch.zeros(1, dtype=torch.uint8)], rank, 5).wait()
        except RuntimeError:
            pass


def answer(make: Callable[[bytes, bytes], bytes]) -> Callable[[Any], None]:
    """As a rank does: a nonce, then what `make` gives for the peer's nonce and its answer."""

    def speak(group: Any) -> None:
        def told(rank: int) -> bytes:
            got = torch.zeros(32, dtype=torch.uint8)
            group.recv([got], rank, c10d._TAG).wait()
            return got.numpy().tobytes()

        def tell(rank: int, data: bytes) -> None:
            group.send([torch.frombuffer(bytearray(data), dtype=torch.uint8)], rank, c10d._TAG).wait()

        for rank in (0, 1):
            tell(rank, os.urandom(32))
        for rank in (0, 1):
            nonce = told(rank)
            tell(rank, make(nonce, told(rank)))
        answer_nothing(group)

    return speak


STRANGERS = {
    "silent": answer_nothing,
    "guesses": answer(lambda nonce, theirs: os.urandom(32)),
    "reflects": answer(lambda nonce, theirs: theirs),
    "pickles": answer(lambda nonce, theirs: pickle.dumps(Run())[:32].ljust(32, b".")),
}
UNPROVED = (
    "rank 2 of the Gloo group did not prove that it belongs to this job: something else answered on its port, or called"
    " in its place; see docs/security.md"
)
SILENT = (
    "rank 2 of the Gloo group did not prove within 120 s that it belongs to this job: it has stopped, or something "
    "else answered on its port; see docs/security.md"
)


def watch(folder: str, rank: int) -> None:
    """The time for proofs, which is 120 s, is over once ranks 0 and 1 have heard each other, and nothing of rank 2."""
    proofs: list[proof.Proof] = []
    looks = itertools.count()

    class Watched(proof.Proof):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            proofs.append(self)

    def now() -> float:
        if proofs and proofs[0].silent == [2]:
            Path(folder, f"heard{rank}").touch()
        over = all(Path(folder, f"heard{each}").exists() for each in (0, 1))
        return 120.0 * (next(looks) > 0 and over)

    proof.Proof, proof.monotonic, proof._LOOK_SECONDS = Watched, now, 0.05  # type: ignore[misc]


def start(rank: int, folder: str, stranger: str) -> None:
    """Rank 2 is late, and a stranger that knows the keys has joined in its place."""
    torch.set_num_threads(1)
    os.chdir(folder)
    world = world_of(rank, 3, 3)
    meet = meet_of(Keyed, folder, rank, 3)
    if rank == 2:
        group = c10d.group("gloo", Keys(meet, 2, 3), world, range(3), PATIENCE, c10d.name_of("gloo", range(3)))
        STRANGERS[stranger](group)
        return
    if stranger == "silent":
        watch(folder, rank)
    try:
        c10d.connect("gloo", Config(timeout=PATIENCE, start_timeout=120.0), world, meet)
    except DadtError as error:
        print(f"{type(error).__name__}: {error}")
        sys.stdout.flush()


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_in_a_late_ranks_place_ends_the_start_on_all_ranks(tmp_path: Path, stranger: str) -> None:
    ended = printed(tmp_path, start, *[(rank, str(tmp_path), stranger) for rank in range(3)])
    assert [each.code for each in ended[:2]] == [0, 0], ended
    expected = f"Unproved: {SILENT if stranger == 'silent' else UNPROVED}\n"
    assert [each.said for each in ended[:2]] == [expected] * 2
    assert not (tmp_path / "ran").exists()


def test_the_keys_of_large_groups_fit_into_what_ranks_may_say() -> None:
    key = f"1/put/{c10d.name_of('gloo', range(10_000))}/9999/9998"
    told = {"rank": 0, "pid": 7, "timeout": 1.0, "key": key}
    assert not WORKER.refusal("put", told, 100)
