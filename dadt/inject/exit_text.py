"""The text in `sys.exit("text")`: why the script ends, which Python prints and does not keep."""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any, NoReturn


class ExitText:
    """Stands in for `sys.exit`. Whether the process ends by that call shows at its end only."""

    def __init__(self) -> None:
        self.fails = False
        """Whether the last call was to end the process with another code than 0."""
        self.text = ""
        """The text given to the last call; empty if it was given a number, or nothing."""
        self.frame: dict[str, Any] | None = None
        """Where the script made the call that gave the text, as {file, line, function, text}; None without a text."""

    def install(self) -> None:
        original = sys.exit

        @functools.wraps(original)
        def exit(status: Any = None, /) -> NoReturn:
            self.fails = status is not None and status != 0
            self.text = "" if status is None or isinstance(status, int) else str(status)
            self.frame = _place(sys._getframe(1)) if self.text else None
            original(status)

        sys.exit = exit


def _place(frame: FrameType) -> dict[str, Any]:
    return {"file": frame.f_code.co_filename, "line": frame.f_lineno, "function": frame.f_code.co_name, "text": ""}
