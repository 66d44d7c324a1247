"""The peers of `dadt bench MODEL --against`."""

from __future__ import annotations

import importlib

from dadt.errors import ConfigError

PEERS = ("ddp", "ddp-view", "ddp-bf16", "ddp-powersgd", "bare", "bare-bf16", "horovod", "sync")
"""`sync` is DADT's, the others are classes of the trainer's."""


def parse_peers(text: str) -> list[str]:
    """The contenders of `ddp,horovod,sync`. Raises ConfigError."""
    peers = list(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))
    for peer in peers:
        if peer not in PEERS:
            raise ConfigError(f"--against {peer}: unknown; choose from {', '.join(PEERS)}")
    return peers


def absent(peer: str) -> str:
    """Why the peer's library cannot be used; empty if it can."""
    if peer != "horovod":
        return ""
    try:
        importlib.import_module("horovod.torch")
    except (ImportError, OSError, RuntimeError) as error:
        return f"horovod is left out: it cannot be imported here ({str(error).splitlines()[0]})"
    return ""
