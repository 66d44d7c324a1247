"""Records the text given to `sys.exit("text")`, which says why the script ends: Python prints the text and does not
store it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from dadt.inject.patch import replaces


class ExitText:
    """Replaces `sys.exit` to record its last call. A script may catch the SystemExit, so whether the call ends the
    process is known only at the process's end."""

    def __init__(self) -> None:
        self.fails = False
        """Whether the last call of sys.exit had a nonzero exit code."""
        self.text = ""
        """The text given to the last call of sys.exit; empty if it was given a number, or nothing."""
        self.frame: dict[str, Any] | None = None
        """Where the script called sys.exit with the text, as {file, line, function, text}; None without a text."""

    def install(self) -> None:
        @replaces("exit", sys)
        def exit(status: Any = None, /) -> None:
            self.fails = status is not None and status != 0
            self.text = "" if status is None or isinstance(status, int) else str(status)
            self.frame = _place(sys._getframe(1)) if self.text else None
            exit.__wrapped__(status)


def _place(frame: FrameType) -> dict[str, Any]:
    return {"file": frame.f_code.co_filename, "line": frame.f_lineno, "function": frame.f_code.co_name, "text": ""}
