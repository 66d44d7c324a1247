"""Takes snapshots of a running script between two of its steps, without changing the results of training."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from dadt.config.check import round_steps, snapshot_interval
from dadt.control import snapshots
from dadt.errors import CommError, DadtError
from dadt.inject.replay import base, snapshot
from dadt.inject.replay.copies import CopyMemory
from dadt.inject.replay.pace import MEASURED, Pace
from dadt.inject.replay.snapshot_timing import SnapshotTiming
from dadt.inject.replay.taken import SeenSnapshot, Taken
from dadt.inject.replay.values import ReadValues
from dadt.train.runtime import Runtime

WAITING = 2
"""Maximum number of snapshots waiting to be written. If snapshots are taken faster than the disk can write them,
training waits."""
UNSEEN = 3
"""Number of consecutive snapshots after which DADT has seen no training forward, at which the user is warned."""
LEAST_PRIORITY = 19
"""Highest nice value of Linux, which is the lowest priority."""
LARGE = 1 << 20
"""Approximate size in bytes up to which a tensor of a batch is hashed completely; of a larger one, evenly spaced values
are hashed."""


class Recorder:
    """Takes each snapshot after the same step on all ranks: an interval in seconds is converted to a number of steps,
    on which ranks agree in the background. A snapshot is begun after a step, without waiting for other ranks or
    changing the script's state. It is completed when the next step begins, and then written by a thread.
    """

    def __init__(self, runtime: Runtime, values: ReadValues, taken: Taken) -> None:
        self._runtime, self._values, self._taken = runtime, values, taken
        self._ranks = runtime.ranks
        self._root = Path(runtime.ranks.config.snapshot_dir)
        steps, seconds = snapshot_interval(runtime.ranks.config.snapshot_every)
        self._timing = SnapshotTiming(steps)
        self._pace = Pace(runtime, seconds) if seconds else None
        self._writing: deque[threading.Thread] = deque()
        self._script = snapshot.script()  # computed before the script changes the working folder
        self.stopped = self._is_proven = False
        self._began = 0.0
        """Time at which the first training forward began, in seconds since the epoch; 0 before that."""
        self._room = CopyMemory()
        self._open: Open | None = None
        self._unseen = 0
        """Number of consecutive snapshots after which no training forward was seen."""

    def goes_on_from(self, step: int, began: float) -> None:
        """Continue to schedule snapshots after a replay up to this step. began: when training began, in seconds since
        the epoch."""
        self._timing.goes_on_from(step)
        self._began = began
        if self._pace is not None:
            self._pace.first = step + MEASURED

    @property
    def plan(self) -> list[float]:
        """Numbers that determine which steps have snapshots, and when training began; the same on all ranks. A new
        worker passes them to `follows`."""
        self._agree(at_once=True)
        first = self._pace.first if self._pace is not None else 0
        return [self._timing.next, self._timing.steps, self._began, self._timing.group, first]

    def follows(self, plan: Sequence[float]) -> None:
        """Adopt the snapshot schedule of the other ranks, as a new worker."""
        timing = self._timing
        timing.next, timing.steps, self._began, timing.group = int(plan[0]), int(plan[1]), plan[2], int(plan[3])
        if self._pace is not None:
            self._pace.first = int(plan[4])

    def stop(self) -> None:
        """Take no more snapshots, because the script could not be resumed from one or does not need any."""
        self.stopped, self._timing.next, self._pace = True, sys.maxsize, None
        self._values.stop()

    def stepped(self) -> None:
        """Called when a step is complete: begin a snapshot if one is due."""
        step = self._ranks.step
        if self._runtime.replay.under_way:
            return
        if self._pace is not None:
            self._pace.stepped()
        self._agree()
        # No training forward was seen between the previous step and this one.
        if self._open is not None and not self._open.seen:
            self._discard(self._timing.likely(step))
        if step < self._timing.next:
            return
        with self._values.aside():
            most_late, taken = round_steps(self._ranks.config.sync_every), self._taken
            if self._timing.takes(step, most_late, possible=taken.possible, rests=taken.rests):
                if self._pace is not None:
                    self._pace.ask()
                self._take(step)

    def saw(self, given: Any) -> None:
        """Note that a forward pass in training mode begins, with these arguments. The snapshot that is being recorded
        keeps a hash of them. The snapshot is dropped if the arguments depend on earlier computations, because a replay
        does not repeat those."""
        self._began = self._began or time()
        step = self._ranks.step
        self._timing.saw(step)
        if self._open is None or self._open.seen:
            return
        if goes_on(given) or self._runtime.script.backwards != self._open.backwards:
            self._discard(step + 1)
        elif step != self._open.told["step"]:
            self._discard(self._timing.likely(step + 1))
        else:
            self._open.told["next"] = digest(given)
            self._unseen = 0
            if self._values.in_step:  # within a closure, the step may change tensors at any time
                self.begins()

    def begins(self) -> None:
        """Called when a step begins to use its gradients, before it starts any communication: complete the open
        snapshot, or drop it if no training forward was seen."""
        if self._open is None:
            return
        with self._values.aside():
            if self._open.seen:
                self._complete(self._open)
                return
            self._unseen += 1
            if self._unseen == UNSEEN:
                self._ranks.say("no snapshot: calls of the model that is trained are not seen", "warning")
            self._discard(self._timing.likely(self._ranks.step + 1) if self._unseen < UNSEEN else self._timing.next)

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Pre-hook of optimizers' steps: complete the open snapshot before the step changes tensors that another thread
        still copies. If the step has a closure, the training forward in the closure completes the snapshot instead."""
        if not callable(args[1] if len(args) > 1 else kwargs.get("closure")):
            self.begins()

    def drop(self) -> None:
        """Drop the snapshot that is not complete, if there is one."""
        if self._open is not None:
            self._open.content.over()
            self._open = None

    def close(self) -> None:
        """Drop the incomplete snapshot, and wait until the others are written."""
        self.drop()
        for thread in self._writing:
            thread.join()

    def _discard(self, again: int) -> None:
        """Drop a snapshot from which training could not be resumed; all ranks take another one after the step
        `again`."""
        self.drop()
        self._timing.retry(again)

    def _agree(self, *, at_once: bool = False) -> None:
        if self._pace is not None and (found := self._pace.told(at_once=at_once)) is not None:
            self._timing.steps, self._timing.next = found

    def _take(self, step: int) -> None:
        common = self._ranks.world.is_of_first(self._ranks.newest.firsts)
        content = self._taken.observe(sys._getframe(), self._room, common=common)
        self._open = Open(content, self._told(step, common=common), self._runtime.script.backwards)

    def _told(self, step: int, *, common: bool) -> dict[str, Any]:
        ranks, parts = self._ranks, self._ranks.world.parts
        every = [rank for each in ranks.members for rank in range(each - each % parts, each - each % parts + parts)]
        members = {"members": every, "shares": ranks.shares, "world": ranks.world.world_size, "parts": parts}
        members |= {"attempt": ranks.world.restarts, "generation": ranks.generation}
        told = {"step": step, "seed": ranks.config.seed, "began": self._began, "common": common}
        return {**told, **members, **self._script}

    def _complete(self, taken: Open) -> None:
        self._open = None
        try:
            same = taken.content.complete()
        except CommError:  # the step that begins notices the lost connection, too, and reports it
            same = False
        if not same:
            taken.content.over()
            return
        while len(self._writing) >= WAITING:
            self._writing.popleft().join()
        before = self._writing[-1] if self._writing else None
        self._writing.append(threading.Thread(target=self._write, args=(taken, before), name="dadt-snapshot"))
        self._writing[-1].start()

    def _write(self, taken: Open, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        rank, folder = self._ranks.world.rank, snapshots.folder_of(self._root, taken.told["step"])
        try:
            # This thread has the lowest priority, so that it uses only processor time that training does not need.
            with suppress(OSError):  # a sandbox may forbid setting the priority
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
            base.keep(self._root, rank, taken.content.base)
            sha256 = snapshot.write(folder, rank, taken.content.content)
            snapshot.complete(folder, rank, sha256, {**taken.told, "base": [*taken.content.base]})
            if not self._is_proven:
                # Read back once, so that values which cannot be loaded are found early, not when the snapshot is
                # needed.
                snapshot.read(folder, rank)
                self._is_proven = True
            if taken.told["common"]:
                snapshots.drop_old(self._root)
                base.drop_unused(self._root)
        except (OSError, RuntimeError, DadtError) as error:  # torch raises RuntimeError if the disk is full
            self._ranks.say(f"no snapshot: {str(error).splitlines()[0]}", "warning")
        finally:
            taken.content.over()


class Open(NamedTuple):
    """A snapshot that is not complete yet."""

    content: SeenSnapshot
    told: dict[str, Any]
    """Facts about the job in the snapshot, besides the state: step, seed, ranks, script and arguments."""
    backwards: int
    """Number of backwards that the script had begun when the snapshot was taken."""

    @property
    def seen(self) -> bool:
        """Whether the training forward that follows the snapshot has begun."""
        return "next" in self.told


def goes_on(given: Any) -> bool:
    """Return whether a forward with these arguments continues the autograd graph of an earlier computation."""
    return any(isinstance(each, torch.Tensor) and each.grad_fn is not None for each in tree_leaves(given))


def digest(given: Any) -> str:
    """Return a hash of all tensors among the arguments, by which a replay checks that it has reached the same batch."""
    found = hashlib.sha256()
    for leaf in tree_leaves(given):
        if isinstance(leaf, torch.Tensor):
            flat = leaf.detach().reshape(-1)
            part = flat[:: max(1, flat.nbytes // LARGE)].contiguous().cpu()
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode() + part.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
