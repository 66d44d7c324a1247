"""PlainLinkState numbers as users list them: 0,3-5."""

from __future__ import annotations

import re

MOST = 1 << 20
"""Of workers, or of anything that is counted: more are a slip of the finger, and would fill the memory."""
_PART = re.compile(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", re.ASCII)


def numbers(text: str) -> set[int] | None:
    """Those that the text names; None where it is no such list, or names one of more than six digits."""
    parts = [_PART.fullmatch(part) for part in text.split(",")]
    listed: set[int] = set()
    for part in parts:
        if part is None:
            return None
        listed.update(range(int(part[1]), int(part[2] or part[1]) + 1))
    return listed
