"""What moves the bytes between ranks. Each executor is a row of EXECUTORS: the core's own, or one file here."""

from __future__ import annotations

from collections.abc import Callable

from dadt import _core
from dadt.config import Config
from dadt.executors import gloo
from dadt.world import World

Meet = Callable[[str, bytes], list[bytes]]
"""(key, this rank's bytes) -> every rank's bytes, by rank."""


Connected = tuple[_core.Engine, Callable[[], None]]
"""The engine, and what to call after it is closed."""


def _core_executor(make: Callable[[int, int], _core.Executor]) -> Callable[[Config, World, Meet], Connected]:
    def connect(config: Config, world: World, meet: Meet) -> Connected:
        executor = make(world.rank, world.world_size)
        executor.connect(meet(f"{executor.name} endpoint", executor.endpoint()), config.start_timeout)
        return _core.Engine(executor, world.rank, world.world_size, config.timeout), lambda: None

    return connect


EXECUTORS: dict[str, Callable[[Config, World, Meet], Connected]] = {
    "shm": _core_executor(_core.ShmExecutor),
    "null": _core_executor(_core.NullExecutor),
    "gloo": gloo.connect,
}


def connect(config: Config, world: World, meet: Meet) -> Connected:
    """An engine over the configured executor, connected to all peers.

    Raises StartTimeout where peers do not come, CommError where they cannot be reached.
    """
    name = config.executor
    if name == "auto":
        name = "shm" if world.local_size == world.world_size else "gloo"
    return EXECUTORS[name](config, world, meet)
