"""Describes an uncaught exception that ended a worker. It is taken from the worker's report or from its output."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dadt import errors
from dadt.control.traceback_text import TRACEBACK, Raised, first_line, innermost

CAUSE_LINES, CAUSE_LETTERS = 10, 4000
LAST_LINES, LAST_LETTERS = 3, 800
"""Numbers of lines and of characters that are shown from the end of a text that is too long. The end often says why
something failed."""
AROUND_LETTERS = 300
ADVICE = re.compile(r"\s*You can disable extension auto-loading with TORCH_DEVICE_BACKEND_AUTOLOAD=0\.?")
"""Matches the advice that torch gives when one of its extensions fails to load. Following it would turn DADT off, so it
is not shown."""
EXIT = SystemExit.__name__
LOST_PEER = re.compile(
    r"gloo.*((closed|reset) by peer|timed out waiting)"
    r"|NCCL.*(remote process exited|closed by .*peer)|ncclRemoteError|Watchdog caught collective operation timeout",
    re.S | re.I,
)
"""Matches errors of torch's own process groups on a rank which say that another rank has ended or has not come."""
OF_TORCH = ("RuntimeError", "DistBackendError", "DistNetworkError")


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorRecord:
    """An uncaught exception in a worker. Exceptions raised because of it are listed in `around`."""

    type: str
    message: str = ""
    frames: Sequence[Mapping[str, Any]] = ()
    """Stack frames as {file, line, function, text}, innermost last."""
    around: Sequence[str] = ()
    """Texts of exceptions that were raised as consequences of this one, outermost first."""
    context: str = ""
    """Text of another exception that was being handled when this one was raised."""
    disk: str = ""
    """Text that says which disk is full and how much space is left; empty if no disk is full."""
    unseen: str = ""
    """Path of a file that a library did not find although this rank has written it: DADT keeps the rank's files apart
    from those of the first rank, where only Python finds them. Empty if there is none."""
    step: int | None = None
    secondary: bool = False
    """Whether another rank's failure caused this exception."""
    thread: str = ""
    time: float = 0.0

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> ErrorRecord:
        return cls(**{name: header[name] for name in cls.__slots__ if name in header})._unwrapped()

    @classmethod
    def of_exit(cls, header: Mapping[str, Any]) -> ErrorRecord:
        """Return a record for a script that ended by calling `sys.exit` with a text. header: fields of the rank's
        report about the call."""
        return cls(type=EXIT, message=header["text"], frames=header["frames"], step=max(0, header["step"]) or None)

    @classmethod
    def from_stderr(cls, tail: bytes) -> ErrorRecord | None:
        """Return the exception of the last traceback in `tail`, the end of a worker's stderr, or the syntax error of a
        script that is not Python; None if there is neither."""
        raised = innermost(tail.decode(errors="replace"))
        return cls._of(raised) if raised is not None else None

    @classmethod
    def _of(cls, raised: Raised) -> ErrorRecord:
        module, _, name = raised.type.rpartition(".")
        known = getattr(errors, name, object) if module == errors.__name__ else object
        secondary = issubclass(known, errors.CommError) or _lost_peer(name, raised.message)
        return cls(type=name, message=raised.message, frames=raised.frames, around=raised.around, secondary=secondary)

    def _unwrapped(self) -> ErrorRecord:
        """If this exception's message contains the traceback of an exception in another process, return that exception;
        otherwise return this record."""
        if TRACEBACK not in self.message or (raised := innermost(self.message)) is None:
            return replace(self, secondary=self.secondary or _lost_peer(self.type, self.message))
        inner = self._of(raised)
        wrapper = f"{self.type}: {first_line(self.message)}".removesuffix(": ")
        around = [*self.around, wrapper, *inner.around]
        return replace(self, type=inner.type, message=inner.message, frames=inner.frames, around=around)

    @property
    def tells_of_peer(self) -> bool:
        """Whether torch's own process group has raised this exception because another rank has ended or has not
        come."""
        return _lost_peer(self.type, self.message)

    @property
    def text(self) -> str:
        if self.type == EXIT:
            return self.message
        return f"{self.type}: {self.message}" if self.message else self.type

    @property
    def reason(self) -> str:
        """The most important information for the user: which disk is full, if one is, or else the exception's text."""
        return (self.disk or self.text).strip()

    @property
    def brief(self) -> str:
        """The first line of the reason for the failure."""
        return shortened(self.reason)[0]

    def lines_around(self) -> list[str]:
        """Return the lines of the report of a failed job that show the exceptions connected with this one."""
        raised = [*self.around, *([self.text] if self.disk else [])]
        texts = [shortened(ADVICE.sub("", text).strip()[:AROUND_LETTERS])[0] for text in raised]
        lines = [f"  within  {text}" for text in dict.fromkeys(texts) if text != self.brief]
        return lines + ([f"  while   handling {shortened(self.context.strip())[0]}"] if self.context else [])


def _lost_peer(kind: str, message: str) -> bool:
    return kind in OF_TORCH and LOST_PEER.search(message) is not None


def shortened(text: str) -> list[str]:
    """Return the lines of a text. If it is long, only its first and last lines are returned, so that it does not push
    earlier output off the screen."""
    lines = ADVICE.sub("", text).split("\n")
    left_out = len(lines) - CAUSE_LINES
    if left_out > 1:
        begin = CAUSE_LINES - LAST_LINES
        lines = [*lines[:begin], f"... {left_out} more lines, in the log ...", *lines[begin + left_out :]]
    text = "\n".join(lines)
    if len(text) > CAUSE_LETTERS:
        text = f"{text[: CAUSE_LETTERS - LAST_LETTERS]} ... {text[-LAST_LETTERS:]}"
    return printable(text).split("\n")


def printable(text: str) -> str:
    """Return the text with its control characters (for example those that move the cursor) escaped."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
