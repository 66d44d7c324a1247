"""Sends the function of `dadt.run` and its arguments to the workers through Ray's object store."""

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
    """A pickled reference to a function and its arguments in Ray's object store. It stays pickled until `load`, since a
    reference can be unpickled only where Ray is connected."""

    reference: bytes

    def load(self) -> Call:
        """Connect to Ray and return the function and its arguments. Called in workers, whose agents have RAY_ADDRESS in
        their environment. Large arrays share the memory of the node's object store, and are read-only."""
        ray = connect(Config(ship=False))
        call: Call = ray.get(ray.cloudpickle.loads(self.reference))
        return call


@contextmanager
def stored(call: Call, config: Config) -> Iterator[RayReference | Call]:
    """Context manager that puts the function and its arguments into Ray's object store and yields what to send to the
    workers. It closes the connection to Ray if it opened it, so that the next call connects again, which is when Ray
    copies the current folder. Raises ConfigError.
    """
    connected = ray_module().is_initialized()
    ray = connect(config)
    try:
        # In a connection through ray://, references are valid in this process only, so the function and its arguments
        # themselves are sent to the workers.
        if ray.util.client.ray.is_connected():
            yield call
        else:
            reference = ray.put(call)
            yield RayReference(ray.cloudpickle.dumps(reference))
    finally:
        if not connected:
            ray.shutdown()
