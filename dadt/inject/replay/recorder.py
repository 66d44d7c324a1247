"""Takes snapshots of a running script, between two of its steps."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, time
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dadt.config.check import snapshot_interval
from dadt.control import snapshots
from dadt.errors import DadtError
from dadt.inject.replay import snapshot
from dadt.inject.replay.taken import Taken
from dadt.inject.replay.values import Values
from dadt.train.runtime import Runtime

MEASURED = 20
"""Steps by whose time the first snapshot is chosen, where they are asked for by the clock."""
LARGE = 1 << 20
"""Bytes of a batch beyond which a part of it stands for it."""


class Recorder:
    """All ranks take each snapshot after the same step: a time becomes a number of steps, on which they agree."""

    def __init__(self, runtime: Runtime, values: Values, taken: Taken) -> None:
        self._runtime, self._values, self._taken = runtime, values, taken
        self._root = Path(runtime.config.snapshot_dir)
        self._steps, self._seconds = snapshot_interval(runtime.config.snapshot_every)
        self._next = self._steps or MEASURED
        self._times: deque[float] = deque(maxlen=MEASURED)
        self._writing: threading.Thread | None = None
        self._script = snapshot.script()  # before it goes to another folder
        self.stopped = self._is_proven = False
        self._began = 0.0
        """When the first training forward did, in seconds since the epoch."""
        self._open: tuple[Path, dict[str, Any], int] | None = None
        """A snapshot that may not be whole yet, what is told of it, and the backwards that the script had begun."""

    def goes_on_from(self, step: int, began: float) -> None:
        """After a replay up to this step; training began at this time."""
        self._next, self._began = step + (self._steps or MEASURED), began

    @property
    def plan(self) -> list[float]:
        """Which steps have snapshots, and when training began: the same on all ranks."""
        return [self._next, self._steps, self._began]

    def follows(self, plan: Sequence[float]) -> None:
        """A new worker's, from now on."""
        self._next, self._steps, self._began = int(plan[0]), int(plan[1]), plan[2]

    def stop(self) -> None:
        """The script has no need of them."""
        self.stopped, self._next = True, sys.maxsize
        self._values.stop()

    def stepped(self) -> None:
        """A step is complete."""
        step = self._runtime.step
        self._times.append(perf_counter())
        if step < self._next or self._runtime.replaying:
            return
        with self._values.aside():
            if self._seconds:
                took = (self._times[-1] - self._times[0]) / max(len(self._times) - 1, 1)
                slowest = max(self._runtime.collect("time of a step", took))
                self._steps = max(1, round(self._seconds / max(slowest, 1e-6)))
                if step == MEASURED < self._steps:
                    self._next = self._steps
                    return
            self._next = step + self._steps
            self._take(step)

    def saw(self, given: Any) -> None:
        """A training forward begins, with these arguments. The first one after a snapshot makes it whole, unless it
        goes on with what was computed before: a replay does not have that."""
        self._began = self._began or time()
        if self._open is None:
            return
        (folder, told, backwards), self._open = self._open, None
        if goes_on(given) or self._runtime.backwards != backwards:
            self._next = self._runtime.step + 1
            self._in_background(lambda: snapshot.discard(folder, self._runtime.world.rank))
        else:
            told["next"] = digest(given)
            self._in_background(lambda: self._complete(folder, told))

    def drop(self) -> None:
        """What is not whole."""
        if self._open is not None:
            folder, self._open = self._open[0], None
            self._in_background(lambda: snapshot.discard(folder, self._runtime.world.rank))

    def close(self) -> None:
        """Drop what is not whole, and wait for what is being written."""
        self.drop()
        if self._writing is not None:
            self._writing.join()

    def _take(self, step: int) -> None:
        r = self._runtime
        if self._open is not None:
            r.say("no snapshot: calls of the model that is trained are not seen", "warning")
            self.close()
        content = self._taken.take(sys._getframe(), common=r.first)
        folder = snapshots.folder_of(self._root, step)
        self._open = folder, self._told(step, common=r.first), r.backwards
        self._in_background(lambda: snapshot.write(folder, r.world.rank, content))

    def _told(self, step: int, *, common: bool) -> dict[str, Any]:
        r = self._runtime
        members = {"members": list(r.members), "shares": r.shares, "common": common}
        return {"step": step, "seed": r.config.seed, "began": self._began, **members, **self._script}

    def _complete(self, folder: Path, told: dict[str, Any]) -> None:
        rank = self._runtime.world.rank
        snapshot.complete(folder, rank, told)
        if not self._is_proven:
            snapshot.read(folder, rank)  # what is no plain value is found now, and not when it is needed
            self._is_proven = True
        if told["common"]:
            snapshots.drop_old(self._root)

    def _in_background(self, write: Any) -> None:
        before = self._writing

        def work() -> None:
            if before is not None:
                before.join()
            try:
                write()
            except (OSError, RuntimeError, DadtError) as error:  # torch raises the second where a disk is full
                self._runtime.say(f"no snapshot: {str(error).splitlines()[0]}", "warning")

        self._writing = threading.Thread(target=work, name="dadt-snapshot")
        self._writing.start()


def goes_on(given: Any) -> bool:
    """Whether a forward that is given this goes on with an older graph."""
    return any(isinstance(each, torch.Tensor) and each.grad_fn is not None for each in tree_leaves(given))


def digest(given: Any) -> str:
    """Of all tensors among arguments: two batches that differ have different ones."""
    found = hashlib.sha256()
    for leaf in tree_leaves(given):
        if isinstance(leaf, torch.Tensor):
            flat = leaf.detach().reshape(-1)
            part = flat[:: max(1, flat.numel() * flat.element_size() // LARGE)].contiguous().cpu()
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode() + part.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
