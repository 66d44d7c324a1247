"""Lists of whole numbers as users write them, such as 0,3-5."""

from __future__ import annotations

import re
from collections.abc import Iterable

MOST = 1 << 20
"""Largest number that a setting accepts as a count, such as that of workers. A larger one is a typing error and would
fill the memory."""
_PART = re.compile(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", re.ASCII)


def text(listed: Iterable[int]) -> str:
    """Return the numbers as text that users write, such as 0,3-5. The function `numbers` parses such text."""
    parts: list[list[int]] = []
    for number in sorted(listed):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}-{part[-1]}" if part[1:] else str(part[0]) for part in parts)


def numbers(text: str) -> set[int] | None:
    """Return the numbers in text such as 0,3-5; None if the text is no such list, or if a number has more than six
    digits."""
    parts = [_PART.fullmatch(part) for part in text.split(",")]
    listed: set[int] = set()
    for part in parts:
        if part is None:
            return None
        listed.update(range(int(part[1]), int(part[2] or part[1]) + 1))
    return listed
