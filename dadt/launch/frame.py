"""What travels on every pipe and socket of the launcher: a JSON header, then bytes."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dadt.errors import DadtError

LENGTHS = struct.Struct(">II")
HEADER_LIMIT = 64 << 20
BODY_LIMIT = 1 << 30
MAGIC = b"\n\0DADT1\0\n"
"""Comes before an agent's first frame: what a shell's or Python's start-up files print comes before it."""
NOISE_LIMIT = 1 << 16
CHUNK = 1 << 16
CHUNKS = 16
"""Read at most this many of them before others get their turn."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message: `kind`, the other keys of its header, and its bytes."""

    kind: str
    header: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def encode(self) -> bytes:
        header = json.dumps({"kind": self.kind, **self.header}).encode()
        return LENGTHS.pack(len(header), len(self.body)) + header + self.body

    def __getitem__(self, key: str) -> Any:
        return self.header[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.get(key, default)


class Parser:
    """Bytes in, frames out; keeps what is not complete yet."""

    def __init__(self, noisy: bool = False) -> None:
        """noisy: skip what comes before the first MAGIC."""
        self.preface = b""
        """What came before the first MAGIC, once that has come."""
        self._buffer = bytearray()
        self._noisy = noisy

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Raises DadtError where the bytes are no frames (another program writes to the same pipe)."""
        self._buffer += data
        if self._noisy and not self._skip_noise():
            return
        while len(self._buffer) >= LENGTHS.size:
            header_size, body_size = LENGTHS.unpack_from(self._buffer)
            if header_size > HEADER_LIMIT or body_size > BODY_LIMIT:
                raise DadtError(f"expected a frame of dadt, got {bytes(self._buffer[:80])!r}")
            end = LENGTHS.size + header_size + body_size
            if len(self._buffer) < end:
                return
            header = json.loads(self._buffer[LENGTHS.size : LENGTHS.size + header_size])
            body = bytes(self._buffer[LENGTHS.size + header_size : end])
            del self._buffer[:end]
            yield Frame(header.pop("kind"), header, body)

    @property
    def noise(self) -> bytes:
        """What has come, as long as no MAGIC has."""
        return bytes(self._buffer) if self._noisy else b""

    def _skip_noise(self) -> bool:
        noise, magic, frames = self._buffer.partition(MAGIC)
        if not magic:
            if len(noise) > NOISE_LIMIT:
                raise DadtError(f"expected an agent of dadt, got {bytes(noise[-80:])!r}")
            return False
        self.preface = bytes(noise)
        self._buffer = frames
        self._noisy = False
        return True


class Link:
    """Frames over two non-blocking descriptors. Owns neither.

    `send` never blocks: what the other side does not take yet stays in `unsent` until `flush`.
    """

    def __init__(self, reader: int, writer: int, noisy: bool = False) -> None:
        """noisy: skip what comes before the first MAGIC."""
        self.reader = reader
        self.writer = writer
        self.unsent = bytearray()
        self._parser = Parser(noisy)
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)

    @property
    def noise(self) -> bytes:
        """What has come where an agent has not answered yet."""
        return self._parser.noise

    @property
    def preface(self) -> bytes:
        """What a login shell has printed before the agent's first word."""
        return self._parser.preface

    def receive(self) -> list[Frame]:
        """The complete frames that have come. Raises EOFError once the other side has closed."""
        frames: list[Frame] = []
        for _ in range(CHUNKS):
            try:
                data = os.read(self.reader, CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""  # reset, or nothing that was sent has arrived for too long
            if not data:
                if frames:
                    break  # said again by the next read
                raise EOFError
            frames.extend(self._parser.feed(data))
        return frames

    def send(self, frame: Frame) -> None:
        self.unsent += frame.encode()
        self.flush()

    def flush(self) -> None:
        """Write what fits. Raises BrokenPipeError once the other side has closed."""
        while self.unsent:
            try:
                written = os.write(self.writer, self.unsent[:CHUNK])
            except BlockingIOError:
                return
            except OSError as error:
                raise BrokenPipeError(str(error)) from error
            del self.unsent[:written]
