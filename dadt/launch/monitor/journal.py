"""Writes `events.jsonl`, which contains the events of a job, one per line. Each is written when it happens."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from dadt.control import private_files
from dadt.control.frame import Frame

MOST_REFUSALS = 1000
KEPT = {
    "connected": (),
    "ready": ("version", "python", "torch", "hostname", "cores", "gpus", "gpu_models", "problems"),
    "lost": ("message",),
    "unstarted": ("message",),
    "started": ("pid",),
    "hello": ("pid", "torch"),
    "claim": ("pid",),
    "say": ("level", "text"),
    "failed": ("type", "message", "step", "secondary", "thread"),
    "ending": ("steps",),
    "done": ("summary",),
    "exit": ("code", "step", "peak_memory", "memory_kills", "stopped"),
    "silent": ("peer", "seconds"),
    "heard": ("peer",),
    "unheard": ("peer",),
    "preempted": (),
    "end": ("stuck", "signal"),
}
"""The kinds of frames that are recorded as events, each with the fields that are recorded."""
NAMES = {"end": "agent ended", "done": "summary", "say": "said", "ready": "agent ready", "lost": "agent lost"}
"""For some kinds of frames, the name of the event in the file, which readers understand more easily."""


class Journal:
    """The event file of a job. Every line is written at once, so that it survives a crash of the launcher.
    Thread-safe."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """warn: called once, with a text for the user, if the file cannot be written."""
        self._path = path
        self._warn = warn
        self._file: IO[bytes] | None = None
        self._lock = threading.Lock()
        self._refusals = 0
        self._broken = False

    def see(self, host: str, frame: Frame) -> None:
        """Record a frame from the agent of this host, if its kind is an event."""
        if frame.kind == "refused":
            self.refused(frame["why"], host=host, rank=frame["rank"])
        elif frame.kind in KEPT:
            facts = {name: frame[name] for name in KEPT[frame.kind] if name in frame.header}
            where = {"host": host, "rank": frame.get("rank")}
            known = {name: value for name, value in where.items() if value not in ("", None)}
            self.write(NAMES.get(frame.kind, frame.kind), **known, **facts)

    def write(self, kind: str, **facts: Any) -> None:
        with self._lock:
            if self._broken:
                return
            try:
                if self._file is None:
                    self._file = private_files.open_file(self._path, "ab", inner=True, buffering=0)
                self._file.write(json.dumps({"time": time.time(), "kind": kind, **facts}).encode() + b"\n")
                return
            except OSError as error:
                self._broken = True
                text = f"{self._path} is incomplete: {error.strerror}"
        self._warn(text)

    def refused(self, why: str, **where: Any) -> None:
        """Record that a connection was refused. Only the first MOST_REFUSALS refusals are recorded, so that the size of
        the file is limited."""
        self._refusals += 1
        if self._refusals <= MOST_REFUSALS:
            self.write("refused", why=why, **where)

    def close(self) -> None:
        """Close the file. Later events are dropped. Idempotent."""
        with self._lock:
            self._broken = True
            if self._file is not None:
                self._file.close()
