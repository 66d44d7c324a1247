"""Records the states of the random generators with which a single worker draws its data.

In a job of one worker, as in plain Python, data and models draw from the same generators. A replay skips most forwards,
so it has to restore these states."""

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
    """Records the state of the random generators before each draw for data, in a job of one worker. In a replay, the
    object restores these states."""

    def __init__(self, values: ReadValues) -> None:
        self._values = values
        self._inside = False
        self._last: State | None = None
        """State of the random generators after the last draw for data; None before the first draw."""
        self._thread, self._pid = threading.get_ident(), os.getpid()

    @contextmanager
    def around(self) -> Iterator[None]:
        """A context around code that draws random numbers for a loader. It records the generators' states before that
        code or, in a replay, restores the recorded states."""
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
