"""What travels on every pipe and socket of the launcher: a JSON header, then bytes."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dadt.control.schema import Speaker
from dadt.control.seal import Seal
from dadt.errors import DadtError

LENGTHS = struct.Struct(">II")
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
    """Bytes in, frames out; keeps what is not complete yet, and never more than the frame that comes may have."""

    def __init__(self, speaker: Speaker, noisy: bool = False) -> None:
        """speaker: who sends, and so what may come. noisy: skip what comes before the first MAGIC."""
        self.preface = b""
        """What came before the first MAGIC, once that has come."""
        self._speaker = speaker
        self._buffer = bytearray()
        self._noisy = noisy
        self._head: Frame | None = None
        """Of the frame that is under way, once its header is there."""
        self._left = 0
        """Bytes of its body."""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Raises DadtError where the bytes are no frames (another program writes to the same pipe), or none that this
        speaker may send."""
        self._buffer += data
        if self._noisy and not self._skip_noise():
            return
        while self._begin() and self._head is not None and len(self._buffer) >= self._left:
            head, self._head = self._head, None
            body = bytes(self._buffer[: self._left])
            del self._buffer[: self._left]
            yield Frame(head.kind, head.header, body)

    @property
    def noise(self) -> bytes:
        """What has come, as long as no MAGIC has."""
        return bytes(self._buffer) if self._noisy else b""

    def _begin(self) -> bool:
        """Whether the header of the next frame is there."""
        if self._head is not None:
            return True
        if len(self._buffer) < LENGTHS.size:
            return False
        header_size, body_size = LENGTHS.unpack_from(self._buffer)
        if header_size > self._speaker.header:
            raise DadtError(f"expected a frame of {self._speaker.name}, got {bytes(self._buffer[:80])!r}")
        end = LENGTHS.size + header_size
        if len(self._buffer) < end:
            return False
        self._head = _checked(self._speaker, bytes(self._buffer[LENGTHS.size : end]), body_size)
        self._left = body_size
        del self._buffer[:end]
        return True

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

    def __init__(
        self, reader: int, writer: int, speaker: Speaker, noisy: bool = False, seal: Seal | None = None
    ) -> None:
        """speaker: the other side. noisy: skip what comes before the first MAGIC. seal: of a connection over a network
        whose two sides have proved themselves to each other."""
        self.reader = reader
        self.writer = writer
        self.unsent = bytearray()
        self._parser = Parser(speaker, noisy)
        self._seal = seal
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
        """The complete frames that have come. Raises EOFError once the other side has closed, DadtError where what
        came is nothing that it may send."""
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
            frames.extend(self._parser.feed(data if self._seal is None else self._seal.opened(data)))
        return frames

    def post(self, data: bytes) -> None:
        """Bytes of frames, to be sent by `flush`."""
        self.unsent += data if self._seal is None else self._seal.closed(data)

    def send(self, frame: Frame) -> None:
        self.post(frame.encode())
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


def _checked(speaker: Speaker, data: bytes, body_size: int) -> Frame:
    """A header as a frame without its bytes. Raises DadtError where the speaker may not say that."""
    try:
        header = json.loads(data)
    except (ValueError, RecursionError):
        header = None
    kind = header.pop("kind", None) if isinstance(header, dict) else None
    if not isinstance(kind, str):
        raise DadtError(f"expected a frame of {speaker.name}, got {data[:80]!r}")
    if refusal := speaker.refusal(kind, header, body_size):
        raise DadtError(refusal)
    return Frame(kind, header)
