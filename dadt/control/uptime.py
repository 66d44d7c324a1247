"""The clock by which all processes of a host tell when something has happened, and which nobody sets."""

from __future__ import annotations

import time


def uptime() -> float:
    """Return the seconds since this host was started, including those in which it was asleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
