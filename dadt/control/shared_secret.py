"""The secret by which processes of a job that were started apart know each other."""

from __future__ import annotations

import hashlib
import os

from dadt.errors import ConfigError

SECRET = "DADT_SECRET"
"""The variable with what all nodes know that meet at a port, and nobody else."""
SECRET_LENGTH = 16
"""Characters. Who sees two nodes meet can try out shorter ones."""
MAKE_SECRET = f"export {SECRET}=$(openssl rand -hex 32) on node 0 and the same value on the others, or give file://"


def shared_key(what: str) -> bytes:
    """What the secret makes; empty without one. what: needs it, for the sentence. Raises ConfigError where the secret
    can be guessed."""
    secret = os.environ.get(SECRET, "")
    if 0 < len(secret) < SECRET_LENGTH:
        short = f"{SECRET} has {len(secret)} characters, fewer than {SECRET_LENGTH}, and can be guessed"
        raise ConfigError(f"{what}: {short}: {MAKE_SECRET}")
    return hashlib.sha256(os.fsencode(secret)).digest() if secret else b""
