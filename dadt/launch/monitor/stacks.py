"""The files beside the logs to which the stacks of ranks go, when they stall or are stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dadt.control import private_files
from dadt.launch.monitor.log_files import stacks_path


class Stacks:
    """The stacks of the ranks in one attempt of the job, which are written to files."""

    def __init__(self, logs: Path, warn: Callable[[str], None]) -> None:
        self._logs = logs
        self._warn = warn
        self.paths: list[Path] = []
        """The files to which stacks were written."""

    def write(self, rank: int, text: bytes) -> None:
        path = stacks_path(self._logs, rank)
        try:
            with private_files.open_file(path, "ab", inner=True) as file:  # keeps the stacks of a stall, which say more
                file.write(b"\n" * bool(file.tell()) + text)
        except OSError as error:
            self._warn(f"{path} could not be written: {error.strerror}")
            return
        if path not in self.paths:
            self.paths.append(path)
