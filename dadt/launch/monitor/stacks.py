"""Writes the stack traces of ranks that stall or are stopped to files beside the logs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dadt.control import private_files
from dadt.launch.monitor.log_files import stacks_path


class Stacks:
    """The files with the stack traces of the ranks in one attempt of the job."""

    def __init__(self, logs: Path, warn: Callable[[str], None]) -> None:
        self._logs = logs
        self._warn = warn
        self.paths: list[Path] = []
        """Files to which stack traces were written."""

    def write(self, rank: int, text: bytes) -> None:
        path = stacks_path(self._logs, rank)
        try:
            # Stack traces are appended, because those of an earlier stall say more than those at the end of the job.
            with private_files.open_file(path, "ab", inner=True) as file:
                file.write(b"\n" * bool(file.tell()) + text)
        except OSError as error:
            self._warn(f"{path} could not be written: {error.strerror}")
            return
        if path not in self.paths:
            self.paths.append(path)
