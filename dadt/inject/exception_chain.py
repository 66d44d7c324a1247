"""Finds the original cause among exceptions that were raised from one another."""

from __future__ import annotations

from typing import NamedTuple

from dadt.control.traceback_text import innermost
from dadt.errors import CommError, DadtError

_MOST = 16
_REMOTE = "RemoteTraceback"
"""Exception classes whose names end like this only carry the traceback of another process as text. The process pools of
multiprocessing, concurrent.futures and joblib raise them."""


class Chain(NamedTuple):
    cause: BaseException
    """The original exception, from which all others were raised."""
    around: list[str]
    """Texts of the exceptions that were raised from the cause, the outermost one first."""
    context: str
    """Text of another exception that was being handled when the cause was raised; empty if there is none."""
    remote: str
    """Traceback text of the other process in which the cause was raised; empty if it was raised in this process."""
    secondary: bool
    """Whether the exception was caused by another rank's failure."""


def chain_of(error: BaseException) -> Chain:
    """Find the cause of an exception by following `raise ... from ...` and exception groups. An exception that was
    merely being handled at the time need not be the cause, and is returned separately as `context`."""
    around: list[str] = []
    secondary = False
    while True:
        secondary = secondary or isinstance(error, CommError)
        inner = None if isinstance(error, DadtError) else _inner(error)
        if inner is None or len(around) >= _MOST:
            break
        if type(inner).__name__.endswith(_REMOTE):
            return Chain(error, around, "", str(inner), secondary)
        around.append(text_of(error))
        error = inner
    context = None if error.__suppress_context__ or isinstance(error, DadtError) else error.__context__
    return Chain(error, around, "" if context is None else text_of(context), "", secondary)


def text_of(error: BaseException) -> str:
    message = str(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def remote_frames(remote: str) -> list[dict[str, object]]:
    """Return the frames {file, line, function, text} of a traceback given as text, innermost last."""
    raised = innermost(remote)
    return [{**frame, "line": int(frame["line"])} for frame in raised.frames] if raised is not None else []


def _inner(error: BaseException) -> BaseException | None:
    group = getattr(error, "exceptions", None)  # set in an ExceptionGroup, a class that Python 3.10 does not have
    if isinstance(group, tuple) and group and isinstance(group[0], BaseException):
        return group[0]
    return error.__cause__
