"""Waiting for a neighbour of a gossip."""

from __future__ import annotations

import pytest

from dadt.algorithms.gossip.edge import done_within
from dadt.errors import CommTimeout


class JustNow:
    """Is done between the end of the first wait and the look at it."""

    def __init__(self, error: Exception | None) -> None:
        self.done = False
        self.source = 0
        self._error = error

    def wait(self, timeout: float) -> None:
        if not self.done:
            self.done = True
            raise CommTimeout("too late")
        if self._error is not None:
            raise self._error


def test_what_comes_at_the_last_moment_has_come() -> None:
    assert done_within(JustNow(None), 0.01)


def test_an_error_at_the_last_moment_is_raised() -> None:
    with pytest.raises(CommTimeout, match="of its own"):
        done_within(JustNow(CommTimeout("of its own")), 0.01)
