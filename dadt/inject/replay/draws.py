"""The random numbers of a single worker's data: drawn from the one stream that its models draw from, too, as under
plain python. A replay leaves most forwards out, so the state in which its data is drawn is recorded."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from dadt.comm import plain
from dadt.inject.data.seed import State
from dadt.inject.replay.values import ReadValues


class Draws:
    """Records, and in a replay restores, the random state in which a process that trains alone draws its data."""

    def __init__(self, values: ReadValues) -> None:
        self._values = values
        self._inside = False
        self._last: State | None = None
        """The random state after data was drawn last; None before."""
        self._thread, self._pid = threading.get_ident(), os.getpid()

    @contextmanager
    def around(self) -> Iterator[None]:
        """A context around what draws random numbers for a loader: records the state before, or in a replay restores
        it."""
        if self._inside or threading.get_ident() != self._thread or os.getpid() != self._pid:
            yield
            return
        if self._values.replaying:
            noted = self._values.noted()
            state = State.from_plain(plain.decode(zlib.decompress(noted))) if noted else self._last
            if state is not None:
                state.restore()
        else:
            now = State.capture()
            same = self._last is not None and _equal(now, self._last)
            self._values.note(b"" if same else zlib.compress(plain.encode(now.plain(), "random numbers"), 1))
        self._inside = True
        try:
            yield
        finally:
            self._inside, self._last = False, State.capture()


def _equal(one: State, other: State) -> bool:
    alike = torch.equal(one.torch, other.torch) and one.random == other.random
    return alike and all(np.array_equal(a, b) for a, b in zip(one.numpy, other.numpy, strict=True))
