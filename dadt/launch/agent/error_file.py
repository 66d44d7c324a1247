"""Reads a worker's error file, to which torch's decorator `@record` writes the exception that ended the worker."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dadt import errors
from dadt.control import schema
from dadt.control.frame import Frame
from dadt.control.traceback_text import frames_of
from dadt.control.uptime import uptime

VARIABLE = "TORCHELASTIC_ERROR_FILE"
LIMIT = 1 << 20
"""Largest number of bytes to read from an error file."""
RAISED = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?", re.DOTALL)
FRAMES = 5
SHOWN = 500
"""Number of characters after which a name or a line of code is cut off in a report."""


class ErrorFile:
    """The error file of one rank of this host, to which `@record` writes the exception that ends the worker."""

    def __init__(self, socket: Path, rank: int) -> None:
        """socket: the agent's socket, in whose folder the error file lies."""
        self._path = socket.with_name(f"error-rank{rank}.json")
        self._rank = rank

    def prepare(self) -> dict[str, str]:
        """Remove the error file of an earlier worker of this rank. Returns the environment variable that names the
        file, for a worker that is about to start."""
        self._path.unlink(missing_ok=True)
        return {VARIABLE: str(self._path)}

    def failure(self, pid: int) -> Frame | None:
        """Return a frame that reports the exception in the error file; None if the worker wrote no exception there."""
        told, at = self._read()
        message = told.get("message")
        if isinstance(message, Mapping):
            extra = message.get("extraInfo")
            trace = extra.get("py_callstack") if isinstance(extra, Mapping) else None
            message = message.get("message")
        else:
            trace = None
        if not isinstance(message, str) or not message.strip():
            return None
        raised = RAISED.fullmatch(message.strip()[: schema.TEXT])
        kind = raised["type"] if raised is not None else "error"
        known = getattr(errors, kind, object)
        header = {
            "rank": self._rank,
            "pid": pid,
            "line": 0,
            "type": kind[:SHOWN],
            "message": (raised["message"] or "") if raised is not None else message.strip()[: schema.TEXT],
            "frames": _frames(trace if isinstance(trace, str) else ""),
            "step": None,
            "secondary": isinstance(known, type) and issubclass(known, errors.CommError),
            "thread": "",
            "time": at,
        }
        return Frame("failed", header)

    def _read(self) -> tuple[Mapping[str, Any], float]:
        """Return the content of the error file and its host's uptime when it was written. Invalid content counts as
        empty, since the worker may have written anything."""
        with suppress(OSError, ValueError, RecursionError):
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                found = os.fstat(descriptor)
                if stat.S_ISREG(found.st_mode) and isinstance(told := json.loads(file.read(LIMIT)), dict):
                    return told, uptime() - (time.time() - found.st_mtime)
        return {}, 0.0


def _frames(trace: str) -> list[dict[str, Any]]:
    """Return the innermost stack frames of the user's code; if the trace has none, the innermost frames of any code."""
    texts = ("file", "function", "text")
    frames = frames_of(trace)[-FRAMES:]
    return [{"line": int(f["line"]), **{name: (f[name] or "")[:SHOWN] for name in texts}} for f in frames]
