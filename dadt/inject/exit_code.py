"""The exit code of a process whose script has ended well and whose training has not."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


class _Last:
    """Python clears `sys` behind all modules: what a script has registered to run at its end has run then, and its open
    files are written. An exception at that point changes no exit code."""

    def __init__(self, code: int) -> None:
        self._code = code
        self._exit: Callable[[int], None] = os._exit

    def __del__(self) -> None:
        self._exit(self._code)


def end_with(code: int) -> None:
    """The interpreter ends as it would, and the process with this code."""
    vars(sys)["_dadt_exit_code"] = _Last(code)
