"""Takes snapshots of a running script, between two of its steps, which it would have taken just so without them."""

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

from dadt.config.check import snapshot_interval
from dadt.control import snapshots
from dadt.errors import CommError, DadtError
from dadt.inject.replay import snapshot
from dadt.inject.replay.copies import CopyMemory
from dadt.inject.replay.pace import MEASURED, Pace
from dadt.inject.replay.taken import SeenSnapshot, Taken
from dadt.inject.replay.values import ReadValues
from dadt.train.runtime import Runtime

WAITING = 2
"""Snapshots that may wait to be written: where they come faster than the disk takes them, training waits for it."""
UNSEEN = 3
"""Number of snapshots in a row without a training forward after them at which the user is warned."""
LEAST_PRIORITY = 19
"""The highest nice value of Linux."""
LARGE = 1 << 20
"""Batches of more bytes are hashed from a sample of their values."""


class Recorder:
    """All ranks take each snapshot after the same step: a time becomes a number of steps, on which they agree beside
    training. A snapshot is seen behind a step, without waiting for anybody or changing anything, and is complete when
    the next step begins; then a thread writes it."""

    def __init__(self, runtime: Runtime, values: ReadValues, taken: Taken) -> None:
        self._runtime, self._values, self._taken = runtime, values, taken
        self._ranks = runtime.ranks
        self._root = Path(runtime.ranks.config.snapshot_dir)
        self._steps, self._seconds = snapshot_interval(runtime.ranks.config.snapshot_every)
        self._next = self._steps or sys.maxsize
        self._pace = Pace(runtime, self._seconds) if self._seconds else None
        self._writing: deque[threading.Thread] = deque()
        self._script = snapshot.script()  # before it goes to another folder
        self.stopped = self._is_proven = False
        self._began = 0.0
        """When the first training forward began, in seconds since the epoch; 0 before."""
        self._room = CopyMemory()
        self._open: Open | None = None
        self._forward = self._group = 0
        """The step behind which the last training forward began, and the steps between the last two that had any."""
        self._due = 0
        """The step for which a snapshot was due that is put off; 0 if none is."""
        self._unseen = 0
        """Snapshots in a row that no training forward followed."""

    def goes_on_from(self, step: int, began: float) -> None:
        """Go on after a replay up to this step. began: when training began, in seconds since the epoch."""
        self._next, self._began = step + self._steps if self._steps else sys.maxsize, began
        self._forward = step
        if self._pace is not None:
            self._pace.first = step + MEASURED

    @property
    def plan(self) -> list[float]:
        """Numbers that say which steps have snapshots, and when training began; the same on all ranks. See
        `follows`."""
        self._agree(at_once=True)
        first = self._pace.first if self._pace is not None else 0
        return [self._next, self._steps, self._began, self._group, first]

    def follows(self, plan: Sequence[float]) -> None:
        """Follow this plan of other ranks, as a new worker, from now on."""
        self._next, self._steps, self._began, self._group = int(plan[0]), int(plan[1]), plan[2], int(plan[3])
        if self._pace is not None:
            self._pace.first = int(plan[4])

    def stop(self) -> None:
        """Take no snapshots any more, as the script has no need of them."""
        self.stopped, self._next, self._pace = True, sys.maxsize, None
        self._values.stop()

    def stepped(self) -> None:
        """A step is complete."""
        step = self._ranks.step
        if self._runtime.replay.under_way:
            return
        if self._pace is not None:
            self._pace.stepped()
        self._agree()
        if self._open is not None and not self._open.seen:  # a step that follows another, without a forward between
            self._discard(max(step, self._forward + self._group))
        if step < self._next:
            return
        with self._values.aside():
            late = step - self._due if self._due else 0
            if not self._taken.possible or (not self._taken.rests and late < self._ranks.config.sync_every):
                self._due, self._next = self._due or step, step + 1
                return
            self._due = 0
            if self._pace is not None:
                self._pace.ask()
            self._next = step + self._steps if self._steps else sys.maxsize
            self._take(step)

    def saw(self, given: Any) -> None:
        """A training forward begins, with these arguments. The snapshot before it notes their hash, or is dropped if
        the forward goes on with what was computed before: a replay does not have that."""
        self._began = self._began or time()
        step = self._ranks.step
        if step != self._forward:
            self._group, self._forward = step - self._forward, step
        if self._open is None or self._open.seen:
            return
        if goes_on(given) or self._runtime.script.backwards != self._open.backwards:
            self._discard(step + 1)
        elif step != self._open.told["step"]:
            self._discard(self._again())
        else:
            self._open.told["next"] = digest(given)
            self._unseen = 0
            if self._values.in_step:  # in a closure: who knows when it changes something
                self.begins()

    def begins(self) -> None:
        """A step begins to use its gradients. Nothing of it is launched yet."""
        if self._open is None:
            return
        with self._values.aside():
            if self._open.seen:
                self._complete(self._open)
                return
            self._unseen += 1
            if self._unseen == UNSEEN:
                self._ranks.say("no snapshot: calls of the model that is trained are not seen", "warning")
            self._discard(self._again() if self._unseen < UNSEEN else self._next)

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A hook of torch's: what another thread still copies is about to change, unless a closure comes first."""
        if not callable(args[1] if len(args) > 1 else kwargs.get("closure")):
            self.begins()

    def drop(self) -> None:
        """Drop the snapshot that is not complete, if there is one."""
        if self._open is not None:
            self._open.content.over()
            self._open = None

    def close(self) -> None:
        """Drop what is not whole, and wait for what is being written."""
        self.drop()
        for thread in self._writing:
            thread.join()

    def _discard(self, again: int) -> None:
        """Drop a snapshot from which training could not go on; all ranks take another one after the step `again`."""
        self.drop()
        self._next = min(self._next, again)

    def _again(self) -> int:
        """The next step that a training forward will follow, as far as the last ones show."""
        return max(self._ranks.step + 1, self._forward + self._group)

    def _agree(self, *, at_once: bool = False) -> None:
        if self._pace is not None and (found := self._pace.told(at_once=at_once)) is not None:
            self._steps, self._next = found

    def _take(self, step: int) -> None:
        content = self._taken.observe(sys._getframe(), self._room, common=self._ranks.first)
        self._open = Open(content, self._told(step, common=self._ranks.first), self._runtime.script.backwards)

    def _told(self, step: int, *, common: bool) -> dict[str, Any]:
        ranks = self._ranks
        members = {"members": list(ranks.members), "shares": ranks.shares, "world": ranks.world.world_size}
        told = {"step": step, "seed": ranks.config.seed, "began": self._began, "common": common}
        return {**told, **members, **self._script}

    def _complete(self, taken: Open) -> None:
        self._open = None
        try:
            same = taken.content.complete()
        except CommError:  # the step that begins notices, too, and says so
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
            # Threads that train come first: this one takes what they leave of the processors.
            with suppress(OSError):  # a sandbox that forbids it: then it competes with them
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
            sha256 = snapshot.write(folder, rank, taken.content.content)
            snapshot.complete(folder, rank, sha256, taken.told)
            if not self._is_proven:
                snapshot.read(folder, rank)  # what is no plain value is found now, and not when it is needed
                self._is_proven = True
            if taken.told["common"]:
                snapshots.drop_old(self._root)
        except (OSError, RuntimeError, DadtError) as error:  # torch raises the second where a disk is full
            self._ranks.say(f"no snapshot: {str(error).splitlines()[0]}", "warning")
        finally:
            taken.content.over()


class Open(NamedTuple):
    """A snapshot that is not complete yet."""

    content: SeenSnapshot
    told: dict[str, Any]
    """What the snapshot says of the job, beside the state."""
    backwards: int
    """Number of backwards that the script had begun when the snapshot was taken."""

    @property
    def seen(self) -> bool:
        """Whether the training forward that follows the snapshot has begun."""
        return "next" in self.told


def goes_on(given: Any) -> bool:
    """Whether a forward with these arguments continues an autograd graph from before."""
    return any(isinstance(each, torch.Tensor) and each.grad_fn is not None for each in tree_leaves(given))


def digest(given: Any) -> str:
    """A hash of all tensors among the arguments, by which a replay sees whether it came to the same batch."""
    found = hashlib.sha256()
    for leaf in tree_leaves(given):
        if isinstance(leaf, torch.Tensor):
            flat = leaf.detach().reshape(-1)
            part = flat[:: max(1, flat.numel() * flat.element_size() // LARGE)].contiguous().cpu()
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode() + part.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
