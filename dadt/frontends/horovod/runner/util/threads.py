"""Horovod's `in_thread`, which calls a function in a new thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call `target(*args)` in a new thread, and return the thread. silent: whether exceptions in the thread are not
    printed."""

    def quietly(*given: Any) -> None:
        try:
            target(*given)
        except Exception:
            if not silent:
                raise

    thread = threading.Thread(target=quietly, args=tuple(args), name=name, daemon=daemon)
    thread.start()
    return thread
