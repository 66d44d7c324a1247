"""Sets a nonzero exit code for a process whose script ended without an error although its training failed."""

from __future__ import annotations

import gc
import io
import os
import sys


class _Last:
    """Ends the process with another exit code when Python destroys this object at exit. Since the object is an
    attribute of `sys`, which Python clears after all other modules, everything that the script registered to run at
    exit has run by then. An exception at that point would not change the exit code.
    """

    def __init__(self, code: int) -> None:
        self._code = code
        # Stored on the object, because module globals no longer exist when Python destroys it. The classes are concrete
        # ones, since a test for an abstract class such as io.IOBase would need more globals.
        self._given = os._exit, gc.get_objects, (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)

    def __del__(self) -> None:
        leave, objects, files = self._given
        for kind in files:  # flushes files that the script has left open
            for each in objects():
                if issubclass(type(each), kind):
                    try:
                        each.flush()
                    except (OSError, ValueError):  # the file is closed, detached, or not opened for writing
                        continue
        leave(self._code)


def end_with(code: int) -> None:
    """Let the interpreter end as usual, but make the process end with exit code `code`."""
    vars(sys)["_dadt_exit_code"] = _Last(code)
