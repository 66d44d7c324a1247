"""Which of several exceptions is the cause, where some were raised from others."""

from __future__ import annotations

from typing import NamedTuple

from dadt.control.traceback_text import innermost
from dadt.errors import CommError, DadtError

_MOST = 16
_REMOTE = "RemoteTraceback"
"""Ends the names of classes that only carry the traceback of another process, as text: of multiprocessing's and
concurrent.futures' pools, and of joblib's."""


class Chain(NamedTuple):
    cause: BaseException
    """The exception from which all others were raised."""
    around: list[str]
    """Texts of those that were raised from it, from the outermost one inwards."""
    context: str
    """Text of another exception that was being handled when this one was raised; empty if there is none."""
    remote: str
    """The traceback of another process in which it was raised; empty if it was this one."""
    secondary: bool
    """Whether another rank's failure has caused it."""


def chain_of(error: BaseException) -> Chain:
    """Follows what the raisers have stated (`raise ... from ...`, groups). An exception that was only being handled
    meanwhile need not be the cause, so it is told beside it."""
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
    """The frames {file, line, function, text} of a traceback that is text, innermost last."""
    raised = innermost(remote)
    return [{**frame, "line": int(frame["line"])} for frame in raised.frames] if raised is not None else []


def _inner(error: BaseException) -> BaseException | None:
    group = getattr(error, "exceptions", None)  # of an ExceptionGroup, which Python 3.10 does not have
    if isinstance(group, tuple) and group and isinstance(group[0], BaseException):
        return group[0]
    return error.__cause__
