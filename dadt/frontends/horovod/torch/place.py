"""This process's rank, local rank and other numbers, which are set by `init`. A forked child, such as a DataLoader's
worker, still has them."""

from __future__ import annotations

import math
from collections.abc import Callable

from dadt.api import lifecycle
from dadt.config import Config

_numbers: dict[str, int] = {}
"""This rank's numbers, such as its local rank, by the names of the functions that return them; empty before `init` and
after `shutdown`."""


def begin() -> dict[str, int]:
    """Read this rank's numbers, such as its local rank, from the session, and return them by name."""
    session = lifecycle.session()
    world = session.world
    _numbers.update(
        rank=world.rank,
        size=world.world_size,
        local_rank=world.local_rank,
        local_size=world.local_size,
        cross_rank=world.cross_rank,
        cross_size=session.cross_size,
        is_homogeneous=session.is_homogeneous,
    )
    session.all.timeout = patience()
    return _numbers


def end() -> None:
    """Forget this rank's numbers, such as its local rank, which are valid only until `shutdown`."""
    _numbers.clear()


def is_initialized() -> bool:
    """Return whether this process is between `init` and `shutdown`."""
    return bool(_numbers)


def _asked(name: str, what: str) -> Callable[[], int]:
    def ask() -> int:
        if not _numbers:
            raise ValueError("Horovod has not been initialized; use hvd.init().")
        return _numbers[name]

    ask.__name__ = ask.__qualname__ = name
    ask.__doc__ = f"Return {what}. Raises ValueError before `init`."
    return ask


rank = _asked("rank", "the rank of this process")
size = _asked("size", "the number of ranks")
local_rank = _asked("local_rank", "the number of this process among those of its host")
local_size = _asked("local_size", "the number of ranks on this host")
cross_rank = _asked("cross_rank", "the number of this host among all hosts")
cross_size = _asked("cross_size", "the number of hosts")
is_homogeneous = _asked("is_homogeneous", "whether all hosts have as many ranks as each other")


def patience() -> float:
    """Return how many seconds to wait for other ranks: the value of `--timeout` if it differs from the default, or
    infinity, as in Horovod. Lost ranks are noticed in any case."""
    timeout = lifecycle.session().config.timeout
    return math.inf if timeout == Config().timeout else timeout
