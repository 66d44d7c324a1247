"""Implements `--metrics tensorboard:DIR`: writes event files for TensorBoard, with one run per rank."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from dadt.control import private_files
from dadt.errors import ConfigError
from dadt.launch.monitor.metrics.metric import METRICS
from dadt.launch.monitor.watch import Gauge, Mark, Watch

SECONDS = 1.0


class TensorBoard:
    """Writes the metrics of each rank to a run of its own, DIR/<job>/rank<r>, by optimizer step. One chart then shows
    all ranks, and DIR may contain several jobs."""

    def __init__(self, place: str) -> None:
        """place: the folder DIR of --metrics tensorboard:DIR. Raises ConfigError if the folder cannot be written."""
        self._folder = Path(place)
        try:
            private_files.make_folder(self._folder)
        except OSError as error:
            raise ConfigError(f"--metrics tensorboard:{place}: cannot be made ({error.strerror})") from error
        if not os.access(self._folder, os.W_OK | os.X_OK):
            raise ConfigError(f"--metrics tensorboard:{place}: cannot be written; give another folder")
        self._runs: list[_Run] = []
        self._due = 0.0

    def begin(self, watch: Watch, facts: Mapping[str, str], warn: Callable[[str], None]) -> str:
        self._warn = warn
        self._runs = [_Run(self._folder / facts["job"] / f"rank{gauge.rank}", gauge) for gauge in watch.gauges]
        return f"metrics for TensorBoard in {self._folder} (tensorboard --logdir {self._folder})"

    def tick(self) -> float:
        now = time.monotonic()
        if now >= self._due:
            self._due = now + SECONDS
            self._write()
        return self._due - now

    def close(self) -> None:
        self._write()
        for run in self._runs:
            run.close()
        self._runs = []

    def _write(self) -> None:
        try:
            for run in self._runs:
                run.write()
        except OSError as error:
            self._warn(f"metrics in {self._folder} are incomplete: {error.strerror}")
            self._runs = []


class _Run:
    """The event file of one rank, which is created once there is something to write."""

    def __init__(self, folder: Path, gauge: Gauge) -> None:
        self._folder = folder
        self._gauge = gauge
        self._writer: RecordWriter | None = None
        self._told: tuple[Mark | None, int, bool, bool] | None = None

    def write(self) -> None:
        gauge = self._gauge
        told = (gauge.last, gauge.member.step, gauge.failed, gauge.code is None)
        if gauge.member.step < 0 or told == self._told:
            return
        self._told = told
        known = [(metric.name, metric.value(gauge)) for metric in METRICS]
        values = [Summary.Value(tag=f"dadt/{name}", simple_value=value) for name, value in known if value is not None]
        self._add(Event(wall_time=time.time(), step=gauge.member.step, summary=Summary(value=values)))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add(self, event: Event) -> None:
        if self._writer is None:
            for folder in (self._folder.parent, self._folder):  # the job's folder first, then the rank's folder in it
                if not folder.exists():
                    private_files.make_inner_folder(folder)
            # TensorBoard reads files whose names have this form, and orders the files of a run by the time in the name.
            name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.0"
            self._writer = RecordWriter(private_files.open_file(self._folder / name, inner=True))
            source = SourceMetadata(writer="dadt")
            self._writer.write(
                Event(wall_time=time.time(), file_version="brain.Event:2", source_metadata=source).SerializeToString()
            )
        self._writer.write(event.SerializeToString())
        self._writer.flush()
