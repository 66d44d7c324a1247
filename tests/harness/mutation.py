"""Changes valid inputs at random, the same way for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

SPECIAL = (*(bytes([byte]) for byte in b'\0\xff\n\r"\\,:=[{-#'), b"9" * 30, b"1e999", b"\xc3\xa9")
"""Where parsers go wrong."""


class Mutator:
    def __init__(self, seed: int, samples: Sequence[bytes], tokens: Sequence[bytes] = ()) -> None:
        """tokens: words of the format, put in and repeated."""
        self._random = random.Random(seed)
        self._samples = samples
        self._tokens = (*SPECIAL, *tokens)

    def pick(self, count: int) -> int:
        return self._random.randrange(count)

    def __call__(self) -> bytes:
        data = bytearray(self._random.choice(self._samples))
        for _ in range(self._random.choice((0, 1, 1, 2, 3, 6))):
            self._change(data)
        return bytes(data)

    def _change(self, data: bytearray) -> None:
        at = self._random.randrange(len(data) + 1)
        kind = self._random.randrange(7)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << self._random.randrange(8)
        elif kind == 1:
            data[at:at] = self._random.choice(self._tokens)
        elif kind == 2:
            token = self._random.choice(self._tokens)
            data[at : at + len(token)] = token
        elif kind == 3:
            del data[at : at + self._random.randrange(1, 12)]
        elif kind == 4:
            begin = self._random.randrange(len(data) + 1)
            data[at:at] = data[begin : begin + self._random.randrange(1, 60)]
        elif kind == 5:
            other = self._random.choice(self._samples)
            data[at:] = other[self._random.randrange(len(other) + 1) :]
        elif self._random.randrange(20) == 0:
            data[at:at] = self._random.choice(self._tokens) * self._random.choice((10, 1_000, 20_000))
        else:
            del data[at:]
