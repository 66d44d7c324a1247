"""Frames: the messages on all of the launcher's pipes and sockets. Each consists of two lengths, a JSON header, and
bytes."""

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
"""Marks the start of an agent's frames, because the output of start-up files of the shell or of Python may precede
them."""
NOISE_LIMIT = 1 << 16
CHUNK = 1 << 16
CHUNKS = 16
"""Number of chunks that are read in a row before the caller does other work."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message: its kind, the other keys of its header, and its body of bytes."""

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
    """Parses a stream of bytes into frames. Buffers at most one incomplete frame, whose size is limited by its kind."""

    def __init__(self, speaker: Speaker, noisy: bool = False) -> None:
        """speaker: the sender, which determines the frames that are allowed. noisy: whether to skip everything that
        arrives before MAGIC."""
        self.preface = b""
        """Output of a login shell or of Python's start-up files before the agent's MAGIC; empty until MAGIC has
        arrived."""
        self._speaker = speaker
        self._buffer = bytearray()
        self._noisy = noisy
        self._head: Frame | None = None
        """Header of the frame that is being received, once the header is complete."""
        self._left = 0
        """Number of bytes in the body of the frame that is being received."""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add received bytes and yield all complete frames. Raises DadtError if the bytes are no frames, for example
        because another program writes to the same pipe, or if the speaker may not send such a frame."""
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
        """Bytes received so far, while MAGIC has not arrived; else empty."""
        return bytes(self._buffer) if self._noisy else b""

    def _begin(self) -> bool:
        """Parse the header of the next frame, unless this was done already. Returns whether the header is complete."""
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
    """Frames over two non-blocking file descriptors, which the caller owns.

    `send` never blocks: bytes that do not fit into the pipe stay in `unsent` until `flush`.
    """

    def __init__(
        self, reader: int, writer: int, speaker: Speaker, noisy: bool = False, seal: Seal | None = None
    ) -> None:
        """speaker: the other side, which determines the frames that are allowed. noisy: whether to skip everything
        before the first MAGIC. seal: encryption state of a connection over a network, after the handshake."""
        self.reader = reader
        self.writer = writer
        self.unsent = bytearray()
        self.parser = Parser(speaker, noisy)
        self._seal = seal
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)

    def receive(self) -> list[Frame]:
        """Return the complete frames received so far. Raises EOFError once the other side has closed, and DadtError for
        bytes that it may not send."""
        frames: list[Frame] = []
        for _ in range(CHUNKS):
            try:
                data = os.read(self.reader, CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""  # the connection was reset or timed out, which counts as closed
            if not data:
                if frames:
                    break  # return the frames first; the next call reads the end again and raises EOFError
                raise EOFError
            frames.extend(self.parser.feed(data if self._seal is None else self._seal.opened(data)))
        return frames

    def post(self, data: bytes) -> None:
        """Queue the bytes of encoded frames for the next `flush`."""
        self.unsent += data if self._seal is None else self._seal.closed(data)

    def send(self, frame: Frame) -> None:
        self.post(frame.encode())
        self.flush()

    def flush(self) -> None:
        """Write as many queued bytes as the descriptor accepts without blocking. Raises BrokenPipeError once the other
        side has closed."""
        while self.unsent:
            try:
                written = os.write(self.writer, self.unsent[:CHUNK])
            except BlockingIOError:
                return
            except OSError as error:
                raise BrokenPipeError(str(error)) from error
            del self.unsent[:written]


def _checked(speaker: Speaker, data: bytes, body_size: int) -> Frame:
    """Parse a header into a frame without its body. Raises DadtError if the speaker may not send it."""
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
