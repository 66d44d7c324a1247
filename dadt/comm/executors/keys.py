"""A torch Store for libraries that need one, without a server: its keys and values travel over the rendezvous of the
ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from dadt.comm.executors.meet import Meet
from dadt.errors import DadtError


class Keys(Store):
    """One rank's torch Store, whose keys and values travel over a Meet (rendezvous of ranks). Waits are limited by the
    Meet's timeout; a library's own timeout is ignored. Methods may be called from any thread."""

    def __init__(self, meet: Meet, rank: int, size: int) -> None:
        """rank, size: this rank's number in the library's group, and the size of the group."""
        super().__init__()
        self._meet = meet
        self._rank = rank
        self._size = size
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        blob = value.encode() if isinstance(value, str) else bytes(value)
        self._known[key] = blob
        self._meet.put(key, blob)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        absent = [each for key in keys if key not in self._known for each in self._alike(key)]
        if absent:
            self._known.update(zip(absent, self._meet.get(absent), strict=True))

    def holds(self, address: bytes) -> bool:
        """Return whether a value known to this rank contains this address."""
        return any(address in value for value in self._known.values())

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether this rank knows all these keys. Does not ask other ranks, because NCCL calls this once a
        second throughout the run."""
        return all(key in self._known for key in keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [self._known[key] for key in keys]

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> Keys:
        return self

    def _alike(self, key: str) -> list[str]:
        """Return the keys that differ from `key` only in the rank and that this rank does not know yet. Gloo asks for
        these keys one by one, and fetching all at once saves requests to the launcher."""
        of_all = key.rpartition("/")[0]
        if f"{of_all}/{self._rank}" not in self._known:
            return [key]
        return [each for rank in range(self._size) if (each := f"{of_all}/{rank}") not in self._known]

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing, because one deadline applies to the whole start of a job."""

    def add(self, key: str, value: int) -> int:
        raise _unknown("add")

    def append(self, key: str, value: bytes) -> None:
        raise _unknown("append")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise _unknown("compare_set")

    def delete_key(self, key: str) -> bool:
        raise _unknown("delete_key")


def _unknown(verb: str) -> DadtError:
    return DadtError(
        f"this backend asks its store for {verb}, and DADT's has set, get, wait and check -> give another --executor"
    )
