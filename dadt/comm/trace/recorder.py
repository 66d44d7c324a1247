"""Records each rank's work in Chrome's trace format: one part per rank while the job runs, merged into one file at its
end."""

from __future__ import annotations

import json
import platform
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from dadt.control import private_files
from dadt.control.timeline_file import PART_HEAD, part, prepare
from dadt.errors import ConfigError

if TYPE_CHECKING:
    from dadt._core import Engine
    from dadt.comm.executors.base import Connection
    from dadt.comm.link_totals import LinkTotals
    from dadt.comm.trace.gather import TimelinePeers
    from dadt.comm.trace.gpu import GpuTrack
    from dadt.comm.trace.links import LinkCounters
    from dadt.world import World

_TRAINING, _QUEUE, _FIRST_ENGINE = 1, 2, 3
"""Track numbers in the trace, which must be the same in csrc/engine/timeline.h."""
_DRAIN_SECONDS = 1.0
_MOST_WAITS = 4096
"""Maximum number of waits that are recorded per step; of more waits, the earliest ones are dropped."""


class Timeline:
    """One rank's part of the timeline. All ranks must call `start` and `merge` at the same place in the order of their
    collectives."""

    def __init__(self, path: str, world: World) -> None:
        """Create the file of this rank's part. Raises ConfigError if it cannot be written."""
        self.path = Path(path)
        self.world = world
        prepare(self.path)
        self.part = part(self.path, world.rank)
        try:
            self._file = private_files.open_file(self.part)
            if world.rank == 0:
                self._remove_older()
        except OSError as error:
            raise ConfigError(f"--timeline {self.path}: cannot be written ({error.strerror})") from error
        self._lock = threading.Lock()
        self._tracks = _FIRST_ENGINE
        self._gpus: list[GpuTrack] = []
        self._links: LinkCounters | None = None
        self._waits: deque[tuple[str, float, float]] = deque(maxlen=_MOST_WAITS)
        self._step_ended = 0.0
        self.error = ""
        """Reason why this rank's part is incomplete; empty if it is complete."""
        self._thread: threading.Thread | None = None
        self.merged_by: TimelinePeers | None = None
        """The collectives with which the timeline was merged; kept, because operations that timed out may still use
        their memory."""

    def start(self, peers: TimelinePeers) -> None:
        """Start recording, with times on rank 0's clock. All ranks must call this. Raises CommError."""
        from dadt import _core
        from dadt.comm.trace.clock import align

        self.clock = align(peers, self.world)
        self._core = _core.Timeline(self.world.rank, self.clock.origin)
        self._write(PART_HEAD)
        self._name("process_name", 0, name=f"rank {self.world.rank} ({platform.node()})")
        self._name("process_sort_index", 0, sort_index=self.world.rank)
        self._name("thread_name", _TRAINING, name="training")
        self._name("thread_name", _QUEUE, name="negotiation and queue")
        self._name("dadt", 0, world_size=self.world.world_size, clock_error_us=round(self.clock.error * 1e6, 1))
        self._step_ended = perf_counter()
        self._thread = threading.Thread(target=self._drain, name="dadt-timeline", daemon=True)
        self._thread.start()

    def record(self, connection: Connection, name: str) -> None:
        """Record the operations of the connection's C++ engines and of its GPU, each on a track of its own."""
        self._record(connection.engine, name)
        if connection.broadcaster is not None:
            self._record(connection.broadcaster, f"{name}: broadcasts")
        device = connection.device
        if device is not None and device.device.type == "cuda":
            from dadt.comm.trace.gpu import GpuTrack

            self._name("thread_name", self._tracks, name=f"{name} on {device.device}")
            self._gpus.append(GpuTrack(device.device, self.world.rank, self._tracks, self.clock.origin))
            device.on_computed = self._gpus[-1].add
            self._tracks += 1

    def count(self, totals: Callable[[], Mapping[int, LinkTotals]]) -> None:
        """Show the traffic with other hosts in the timeline. totals: returns the totals for each host, keyed by the
        number of one of its ranks."""
        from dadt.comm.trace.links import LinkCounters

        self._links = LinkCounters(totals, self.world.rank, self.clock.origin)

    def _record(self, engine: Engine, name: str) -> None:
        self._name("thread_name", self._tracks, name=name)
        engine.record(self._core, self._tracks)
        self._tracks += 1

    def waited(self, name: str, begin: float) -> None:
        """Record that the training thread has waited for operation `name` since `begin`, a value of perf_counter."""
        self._waits.append((name, begin, perf_counter()))

    def step(self, number: int) -> None:
        """Record that the training thread has completed step `number`, counted from 0 as in the names of exchanges."""
        begin, self._step_ended = self._step_ended, perf_counter()
        self._core.step(number, begin, self._step_ended, list(self._waits))
        self._waits.clear()

    def stop(self) -> None:
        """Stop recording; the events so far stay in this rank's part. Does not wait for peers. May be called
        repeatedly."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._core.close()
        thread.join(10 * _DRAIN_SECONDS)
        self._file.close()
        if self._core.dropped:
            self.error = self.error or f"{self._core.dropped:,} events came too fast to be kept"

    def _name(self, what: str, track: int, **arguments: Any) -> None:
        event = {"ts": 0, "ph": "M", "pid": self.world.rank, "tid": track, "name": what, "args": arguments}
        self._write(json.dumps(event, separators=(",", ":")).encode() + b",\n")

    def _drain(self) -> None:
        """Run by a thread: write recorded events to this rank's file once a second, so that memory stays bounded."""
        while self._thread is not None:
            self._write(self._core.drain(_DRAIN_SECONDS) + self._of_others())
        self._write(self._core.drain(0.0) + self._of_others())

    def _of_others(self) -> bytes:
        """Return the events of GPUs and links, which the C++ core does not know."""
        links = self._links.drain() if self._links is not None else b""
        return links + b"".join(each.drain() for each in list(self._gpus))

    def _write(self, data: bytes) -> None:
        with self._lock:
            if not data or self.error:
                return
            try:
                self._file.write(data)
                # Flush, so that a forked child does not inherit buffered data, which the child would write a second
                # time.
                self._file.flush()
            except OSError as error:
                self.error = f"{self.part} could not be written ({error.strerror})"

    def _remove_older(self) -> None:
        """Remove files of an earlier job: the merged timeline, and the parts of ranks that do not exist in this job."""
        self.path.unlink(missing_ok=True)
        for old in self.path.parent.glob(f"{self.path.name}.rank*"):
            number = old.name.rpartition(".rank")[2]
            if number.isdigit() and int(number) >= self.world.world_size:
                old.unlink(missing_ok=True)
