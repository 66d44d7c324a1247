"""How long tests wait for what is to happen: all of them equally, and longer on a slow machine by one factor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

FACTOR = float(os.environ.get("DADT_TEST_PATIENCE", "1"))
"""`DADT_TEST_PATIENCE=3 make test` waits three times as long everywhere."""
PATIENCE = 120.0 * FACTOR
"""Seconds until a test gives up. What is there earlier ends the wait at once, so only tests that fail take so long."""

SETTLE_SECONDS = 20.0 * min(FACTOR, 1.4)
"""Seconds in which what ends at once is gone: less than the 30 s of --orphan-timeout, by which it would end in any
case."""


def _pause() -> None:
    time.sleep(0.01)


def await_that(
    condition: Callable[[], object],
    what: str | Callable[[], object],
    *,
    meanwhile: Callable[[], object] = _pause,
    seconds: float = PATIENCE,
) -> None:
    """Return once the condition holds, and call `meanwhile` until then. what: what is waited for, or a function that
    says it, for the failure if it does not hold within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s for {what() if callable(what) else what}")
        meanwhile()
