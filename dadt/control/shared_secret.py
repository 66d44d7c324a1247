"""The secret (DADT_SECRET) by which separately started processes of a job recognize each other."""

from __future__ import annotations

import hashlib
import os

from dadt.errors import ConfigError

SECRET = "DADT_SECRET"
"""Environment variable with the secret, whose value must be the same on all nodes of the job."""
SECRET_LENGTH = 16
"""Minimum number of characters of a secret. An attacker who has recorded a handshake could find a shorter one by trying
all."""
MAKE_SECRET = f"export {SECRET}=$(openssl rand -hex 32) on node 0 and the same value on the others, or give file://"


def shared_key(what: str) -> bytes:
    """Return the key derived from the secret; empty if no secret is set. what: the purpose of the secret, for the error
    message. Raises ConfigError if the secret is short enough to be guessed."""
    secret = os.environ.get(SECRET, "")
    if 0 < len(secret) < SECRET_LENGTH:
        short = f"{SECRET} has {len(secret)} characters, fewer than {SECRET_LENGTH}, and can be guessed"
        raise ConfigError(f"{what}: {short}: {MAKE_SECRET}")
    return hashlib.sha256(os.fsencode(secret)).digest() if secret else b""
