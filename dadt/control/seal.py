"""Encryption of a network connection in numbered records, after the handshake in which both sides have proved
themselves.

A record consists of its length and its text, encrypted with ChaCha20-Poly1305 (RFC 8439) with the record's number as
nonce. A record that was changed, dropped, repeated or reordered on its way therefore ends the connection.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field

from dadt.errors import DadtError

LENGTH = struct.Struct(">I")
RECORD = 1 << 16
"""Largest number of bytes of plain text in one record."""
TAG_BYTES = 16
NONCE = struct.Struct(">4xQ")


@dataclass(slots=True)
class Direction:
    """One direction of an encrypted connection: its key, and the number of its next record."""

    key: bytes
    number: int = 0

    def nonce(self) -> bytes:
        nonce = NONCE.pack(self.number)
        self.number += 1
        return nonce


@dataclass(slots=True)
class Seal:
    """Encryption state of one side of a connection: a key and record number for each direction. Not thread-safe."""

    sent: Direction
    received: Direction
    _buffer: bytearray = field(default_factory=bytearray)

    @classmethod
    def between(cls, key: bytes, transcript: bytes, mine: bytes, theirs: bytes) -> Seal:
        """Derive the keys of one connection from the job's key. transcript: both sides' random numbers from the
        handshake. mine, theirs: names of the sides."""

        def way(side: bytes) -> Direction:
            return Direction(hmac.digest(key, b"dadt seal " + side + b"\0" + transcript, "sha256"))

        return cls(way(mine), way(theirs))

    def to_text(self) -> str:
        """Return the state as text, for another process that takes over the connection. Call this only between two
        records."""
        return " ".join(f"{way.key.hex()} {way.number}" for way in (self.sent, self.received))

    @classmethod
    def from_text(cls, text: str) -> Seal:
        sent, sent_number, received, received_number = text.split()
        return cls(
            Direction(bytes.fromhex(sent), int(sent_number)),
            Direction(bytes.fromhex(received), int(received_number)),
        )

    def closed(self, data: bytes) -> bytes:
        """Return the data encrypted as one or more records."""
        # Imported here, on first use, since only connections over a network need the package `cryptography`.
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        cipher = ChaCha20Poly1305(self.sent.key)
        records = bytearray()
        for start in range(0, len(data), RECORD):
            part = data[start : start + RECORD]
            length = LENGTH.pack(len(part) + TAG_BYTES)
            records += length + cipher.encrypt(self.sent.nonce(), bytes(part), length)
        return bytes(records)

    def opened(self, data: bytes) -> bytes:
        """Add received bytes and return the text of the records that are complete now. Raises DadtError if a record is
        not the next one that the other side has sent."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        self._buffer += data
        cipher = ChaCha20Poly1305(self.received.key)
        text = bytearray()
        while len(self._buffer) >= LENGTH.size:
            length = bytes(self._buffer[: LENGTH.size])
            (size,) = LENGTH.unpack(length)
            if not TAG_BYTES <= size <= RECORD + TAG_BYTES:
                raise DadtError("a record of the connection was changed on its way: its length cannot be")
            end = LENGTH.size + size
            if len(self._buffer) < end:
                break
            try:
                text += cipher.decrypt(self.received.nonce(), bytes(self._buffer[LENGTH.size : end]), length)
            except InvalidTag:
                raise DadtError("a record of the connection was changed, repeated or left out on its way") from None
            del self._buffer[:end]
        return bytes(text)
