"""The function of `dadt.run` and its arguments, on their way through Ray's object store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dadt.config import Config
from dadt.launch.hosts.ray import connect, ray_module

Call = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RayReference:
    """It has pickled a reference, as that can be unpickled only where Ray is connected."""

    reference: bytes

    def load(self) -> Call:
        """In a worker, whose agent was given RAY_ADDRESS. Large arrays share the memory of the node's object store, and
        are read-only."""
        ray = connect(Config(ship=False))
        call: Call = ray.get(ray.cloudpickle.loads(self.reference))
        return call


@contextmanager
def stored(call: Call, config: Config) -> Iterator[RayReference | Call]:
    """While open, the call is in the store; gives what workers are told. A connection that begins with it ends with it,
    as Ray copies the current folder only when it connects. Raises ConfigError."""
    connected = ray_module().is_initialized()
    ray = connect(config)
    try:
        if ray.util.client.ray.is_connected():  # by ray://, whose references mean something to this process alone
            yield call
        else:
            reference = ray.put(call)
            yield RayReference(ray.cloudpickle.dumps(reference))
    finally:
        if not connected:
            ray.shutdown()
