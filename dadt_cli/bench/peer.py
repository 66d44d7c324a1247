"""Other ways to train that `dadt bench MODEL --against` compares DADT with."""

from __future__ import annotations

import importlib

from dadt.errors import ConfigError

PEERS = ("ddp", "ddp-view", "ddp-bf16", "ddp-powersgd", "bare", "bare-bf16", "horovod", "sync")
"""Names that --against accepts: `sync` is DADT's own algorithm, the others are classes in libraries.py."""
SHARDING = ("hsdp", "fsdp")
"""Names of the peers that `dadt bench fsdp` compares with; each is a class in libraries.py."""


def parse_peers(text: str) -> list[str]:
    """Parse the contenders in a list such as `ddp,horovod,sync`. Raises ConfigError for an unknown name."""
    peers = list(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))
    for peer in peers:
        if peer not in PEERS:
            raise ConfigError(f"--against {peer}: unknown; choose from {', '.join(PEERS)}")
    return peers


def absent(peer: str) -> str:
    """Return why the peer's library cannot be used on this machine; empty if it can be used."""
    if peer != "horovod":
        return ""
    try:
        importlib.import_module("horovod.torch")
    except (ImportError, OSError, RuntimeError) as error:
        return f"horovod is left out: it cannot be imported here ({str(error).splitlines()[0]})"
    return ""
