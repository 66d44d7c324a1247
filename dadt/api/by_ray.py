"""The function of `dadt.run` and its arguments, on their way through Ray's object store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dadt.config import Config
from dadt.launch.hosts.ray import connect

Call = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Stored:
    """It has pickled a reference, as that can be unpickled only where Ray is connected."""

    reference: bytes

    def load(self) -> Call:
        """In a worker, whose agent was given RAY_ADDRESS. Large arrays share the memory of the node's object store, and
        are read-only."""
        ray = connect(Config(ship=False))
        call: Call = ray.get(ray.cloudpickle.loads(self.reference))
        return call


def store(call: Call, config: Config) -> tuple[Stored | Call, Any]:
    """Put it there. Returns what workers are given, and the reference, which keeps it there. Raises ConfigError."""
    ray = connect(config)
    if ray.util.client.ray.is_connected():  # by ray://, whose references mean something to this process alone
        return call, None
    reference = ray.put(call)
    return Stored(ray.cloudpickle.dumps(reference)), reference
