"""Proves that the processes a library has connected are the job's ranks, since libraries accept anyone who connects to
their ports.

Over its connection with each peer, a rank sends a random number and answers the peer's number with a MAC under the
job's secret. Nothing else that arrives over the connection is used before the proof is complete.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import threading
from collections.abc import Callable, Sequence
from time import monotonic

import torch

from dadt.comm.executors.base import Executor
from dadt.errors import PeerLost, Unproved

BYTES = 32
_LABEL = b"dadt: a rank of a group\0"
_PAIR = struct.Struct(">II")
_END_SECONDS = 5.0
_LOOK_SECONDS = 2.0
_TITLES = {"gloo": "Gloo", "nccl": "NCCL", "mpi": "MPI", "ucc": "UCC"}


def prove(
    executor: Executor,
    secret: bytes,
    rank: int,
    ranks: Sequence[int],
    library: str,
    name: str,
    timeout: float,
    strangers: Callable[[], str] = str,
) -> None:
    """Prove to all ranks of a group that this rank belongs to the job, and check their proofs, before any other
    communication. Closes the executor on failure; does nothing without a secret.

    rank: this rank's place in `ranks`, the global ranks for error texts. library, name: the library that connects the
    group, and the group's name. strangers: returns a text that names connected processes outside the job. Raises
    Unproved if peers give no or a wrong proof within `timeout` seconds, and PeerLost if the group fails; Unproved names
    the ranks.
    """
    if not secret or len(ranks) == 1:
        return
    try:
        proof = Proof(executor, secret, rank, len(ranks), name)
        # The proof runs in a thread, since libraries wait as long as training may, which is longer than `timeout`.
        threading.Thread(target=proof.run, name="dadt-proof", daemon=True).start()
        begun = monotonic()
        who, left = "", timeout
        while not (ended := proof.ended.wait(max(0.0, min(left, _LOOK_SECONDS)))) and left > 0:
            # Look for strangers repeatedly, because a library may close their connections before it reports its
            # timeout.
            who = strangers() or who
            left = begun + timeout - monotonic()
        late = not ended or ("imed out" in str(proof.error) and bool(proof.silent))
        if not (late or proof.error is not None or proof.false):
            return
        who = strangers() or who
        answered = f"{who} {Unproved.answered}" if who else ""
        if late:
            raise Unproved(
                f"{_named([ranks[each] for each in proof.silent])} of the {title(library)} group did not prove within "
                f"{monotonic() - begun:.0f} s that it belongs to this job: "
                f"{answered or 'it has stopped, or something else answered on its port'}; see docs/security.md"
            )
        if proof.error is not None:
            why = answered or str(proof.error)
            raise PeerLost(
                f"the {title(library)} group broke while its ranks proved that they belong to this job: {why}"
            ) from proof.error
        raise Unproved(
            f"{_named([ranks[each] for each in proof.false])} of the {title(library)} group did not prove that it "
            "belongs to this job: "
            f"{answered or 'something else answered on its port, or called in its place'}; see docs/security.md"
        )
    except BaseException:
        executor.abort()
        # Wait for the thread, because a thread that is still inside the library when the interpreter ends would abort
        # the process.
        proof.ended.wait(_END_SECONDS)
        executor.close()
        raise


class Proof:
    """One rank's side of the proof that all ranks know the job's secret. The results are valid once `ended` is set."""

    def __init__(self, executor: Executor, secret: bytes, rank: int, size: int, name: str) -> None:
        self._executor = executor
        self._secret = secret
        self._rank = rank
        self._name = name.encode()
        self._received = [torch.zeros(BYTES, dtype=torch.uint8, device="cpu") for _ in range(size)]
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.false: list[int] = []
        """Peers whose answers were wrong."""

    @property
    def silent(self) -> list[int]:
        """Peers from which nothing has arrived in the current exchange."""
        return [peer for peer, each in enumerate(self._received) if peer != self._rank and not each.any()]

    def run(self) -> None:
        """Exchange the proofs with all peers, then set `ended`. Exceptions are stored in `error`, not raised."""
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 (a library may raise anything; `prove` reports it)
            self.error = error
        self.ended.set()

    def _run(self) -> None:
        size = len(self._received)
        mine = secrets.token_bytes(BYTES)
        theirs = self._exchange([mine] * size)
        answers = self._exchange([self._answer(self._rank, peer, mine, theirs[peer]) for peer in range(size)])
        for peer, answer in enumerate(answers):
            right = self._answer(peer, self._rank, theirs[peer], mine)
            if peer != self._rank and not hmac.compare_digest(answer, right):
                self.false.append(peer)

    def _answer(self, of: int, to: int, nonce: bytes, other: bytes) -> bytes:
        text = _LABEL + _PAIR.pack(of, to) + nonce + other + self._name
        return hmac.digest(self._secret, text, hashlib.sha256)

    def _exchange(self, blobs: Sequence[bytes]) -> list[bytes]:
        """Exchange one blob with each peer over the direct connection with it, because data that is passed on in a ring
        would prove nothing about the other connections."""
        for each in self._received:
            each.zero_()
        sends = [torch.frombuffer(bytearray(blob), dtype=torch.uint8) for blob in blobs]
        self._executor.exchange(sends, self._received)
        return [each.numpy().tobytes() for each in self._received]


def title(library: str) -> str:
    return _TITLES.get(library, library)


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "each of ranks ") + ", ".join(map(str, ranks))
