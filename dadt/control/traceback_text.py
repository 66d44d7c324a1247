"""Parses tracebacks from text: from a script's stderr, or from the message of an exception that another process
raised."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TRACEBACK = "Traceback (most recent call last):"
DIRECT = "The above exception was the direct cause of the following exception:"
OWN = "dadt.errors."
"""Prefix of the types of DADT's own exceptions. Their messages explain the failure completely, so no causes of them are
searched for."""
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d{1,9})(?:, in (?P<function>.+))?$')
_ERROR = re.compile(r"^(?P<type>[A-Za-z_][\w.<>]*)(?:: (?P<message>.*))?$")
_NO_PYTHON = re.compile(r'^  File ".+", line \d+\n(?:    .*\n)+(?=(?:Syntax|Indentation|Tab)Error: )', re.MULTILINE)
_LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib/python3|^<")


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception, as far as its traceback text shows it."""

    type: str
    """Name of the exception's type, with its module if the traceback shows one."""
    message: str = ""
    frames: Sequence[Mapping[str, Any]] = ()
    """Stack frames {file, line, function, text}, innermost last; without frames of libraries, unless the traceback has
    no others."""
    around: Sequence[str] = field(default=())
    """Texts of the exceptions that were raised as consequences of this one, outermost first."""

    @property
    def text(self) -> str:
        return f"{self.type.rpartition('.')[2]}: {self.message}" if self.message else self.type.rpartition(".")[2]


def innermost(text: str) -> Raised | None:
    """Return the root cause: the exception of the last traceback or, if it was raised from others, the innermost of
    these. If `text` is the error of a script that is not valid Python, return the syntax error. None if the text
    contains no exception."""
    found = last(text)
    if found is None:
        return None
    raised, before = found
    around = [raised.text]
    while not raised.type.startswith(OWN) and before.rstrip().endswith(DIRECT):
        deeper = last(before.rstrip().removesuffix(DIRECT))
        if deeper is None:
            break
        raised, before = deeper
        around.append(raised.text)
    return Raised(raised.type, raised.message, raised.frames, list(dict.fromkeys(around[:-1])))


def first_line(text: str) -> str:
    """Return the first line of a message, without a traceback that may follow in the message."""
    before = text.partition(TRACEBACK)[0].removesuffix("Original ")
    return next((line.strip() for line in before.splitlines() if line.strip()), "")


def last(text: str) -> tuple[Raised, str] | None:
    """Return the exception of the last traceback in the text, and the text before this traceback."""
    before, found, rest = text.rpartition(TRACEBACK)
    if not found:
        places = list(_NO_PYTHON.finditer(text))
        if not places:
            return None
        before, rest = "", "\n" + text[places[-1].start() :]
    lines = rest.splitlines()[1:]
    for place, line in enumerate(lines):
        if (error := _ERROR.match(line)) is not None:
            return Raised(error["type"], error["message"] or "", frames_of("\n".join(lines[:place]))), before
    return None


def frames_of(text: str) -> list[dict[str, Any]]:
    """Return the stack frames {file, line, function, text} of all tracebacks in the text, innermost last; without
    frames of libraries, unless there are no others."""
    frames: list[dict[str, Any]] = []
    for line in text.splitlines():
        if (frame := _FRAME.match(line)) is not None:
            frames.append({**frame.groupdict(), "text": ""})
        # Only the first indented line is source code; further lines mark the place of the error in it.
        elif line.startswith("    ") and frames and not frames[-1]["text"]:
            frames[-1]["text"] = line.strip()
    return [frame for frame in frames if not _LIBRARIES.search(frame["file"])] or frames
