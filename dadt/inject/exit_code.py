"""The exit code of a process whose script has ended well and whose training has not."""

from __future__ import annotations

import gc
import io
import os
import sys


class _Last:
    """Python clears `sys` behind all modules: what a script has registered to run at its end has run then. An exception
    at that point changes no exit code."""

    def __init__(self, code: int) -> None:
        self._code = code
        # What this needs is gone from its modules then. An abstract class would need more.
        self._given = os._exit, gc.get_objects, (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)

    def __del__(self) -> None:
        leave, objects, files = self._given
        for kind in files:  # those that the script has left open, and nobody closes any more
            for each in objects():
                if issubclass(type(each), kind):
                    try:
                        each.flush()
                    except (OSError, ValueError):  # closed, detached, or not written to
                        continue
        leave(self._code)


def end_with(code: int) -> None:
    """The interpreter ends as it would, and the process with this code."""
    vars(sys)["_dadt_exit_code"] = _Last(code)
