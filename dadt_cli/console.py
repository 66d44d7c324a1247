"""The only place that prints: what workers print, and what dadt itself says (on stderr)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from dadt.errors import DadtError

STREAMS = {"out": 1, "err": 2}


class ReaderGone(DadtError):
    """Whoever read our output has closed it, so there is nobody to train for."""

    exit_code = 141


def lines(stream: str, data: bytes) -> None:
    """Complete lines of a worker, unaltered, to our stdout ("out") or stderr ("err")."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(STREAMS[stream], view) :]
    except BrokenPipeError as error:
        raise ReaderGone from error


def say(text: str, level: str = "info") -> None:
    _write(f"dadt: warning: {text}" if level == "warning" else f"dadt: {text}", level == "warning")


def block(text: Sequence[str]) -> None:
    """What is to stand last on the screen; its first line names the speaker."""
    _write("dadt: " + "\n".join(text), True)


def error(text: str) -> None:
    _write(f"dadt: {text}", True)


def text(text: str) -> None:
    _write(text, False)


def _write(text: str, loud: bool) -> None:
    if loud and sys.stderr.isatty():
        text = f"\x1b[1m{text}\x1b[0m"
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError as error:
        raise ReaderGone from error
