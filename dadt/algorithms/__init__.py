"""What is exchanged, when, and how it is applied. Each algorithm is one file and one line here."""

from __future__ import annotations

from importlib import import_module

from dadt.algorithms.base import Algorithm
from dadt.errors import ConfigError

BUILT_IN = {
    "pipe": "dadt.algorithms.pipe:Pipe",
    "sync": "dadt.algorithms.sync:Sync",
    "local": "dadt.algorithms.local:Local",
    "gossip": "dadt.algorithms.gossip:Gossip",
    "auto": "dadt.algorithms.auto:Auto",
}


def find(name: str) -> type[Algorithm]:
    """The class of an algorithm of ours, or of the user's own: "package.module:Class". Raises ConfigError."""
    module, _, cls = BUILT_IN.get(name, name).partition(":")
    try:
        found = getattr(import_module(module), cls)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"--algorithm {name}: {error}; give <module>:<Class>, the module where Python finds it"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ConfigError(f"--algorithm {name}: {cls} is no subclass of dadt.algorithms.Algorithm")
    return found


__all__ = ["Algorithm", "find"]
