"""Lists of whole numbers as users write them: 0,3-5."""

from __future__ import annotations

import re

MOST = 1 << 20
"""Largest count of workers or anything else; a larger one is a typing error and would fill the memory."""
_PART = re.compile(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", re.ASCII)


def numbers(text: str) -> set[int] | None:
    """The numbers in the list; None if the text is no such list, or a number has more than six digits."""
    parts = [_PART.fullmatch(part) for part in text.split(",")]
    listed: set[int] = set()
    for part in parts:
        if part is None:
            return None
        listed.update(range(int(part[1]), int(part[2] or part[1]) + 1))
    return listed
