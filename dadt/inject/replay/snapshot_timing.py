"""Decides after which steps snapshots are taken. All ranks decide alike, because the decision depends only on facts
that are the same on all ranks after a step."""

from __future__ import annotations

import sys


class SnapshotTiming:
    """Chooses the steps with snapshots: one every `steps` steps, later if none can be taken then, and another one soon
    if one is dropped."""

    def __init__(self, steps: int) -> None:
        """steps: number of steps between two snapshots; 0 as long as it is unknown."""
        self.steps = steps
        self.next = steps or sys.maxsize
        """The step after which the next snapshot is taken, at the earliest."""
        self.forward = self.group = 0
        """`forward`: number of steps before the latest training forward. `group`: number of steps between the latest
        two groups of training forwards."""
        self._due = 0
        """The step for which a delayed snapshot was due; 0 if none is delayed."""

    def goes_on_from(self, step: int) -> None:
        """Continue to schedule snapshots after a replay up to this step."""
        self.next = step + self.steps if self.steps else sys.maxsize
        self.forward = step

    def takes(self, step: int, most_late: int, *, possible: bool, rests: bool) -> bool:
        """Return whether a snapshot is taken after this step, which is complete. Call this once the step `next` is
        reached.

        most_late: number of steps by which a snapshot may be delayed because exchanges are under way. possible: whether
        the script could resume from this point. rests: whether no exchange is under way that a snapshot would leave
        out.
        """
        late = step - self._due if self._due else 0
        if not possible or (not rests and late < most_late):
            self._due, self.next = self._due or step, step + 1
            return False
        self._due = 0
        self.next = step + self.steps if self.steps else sys.maxsize
        return True

    def saw(self, step: int) -> None:
        """Record that a training forward begins. step: the number of steps taken before it."""
        if step != self.forward:
            self.group, self.forward = step - self.forward, step

    def retry(self, step: int) -> None:
        """Take the next snapshot after this step, unless one is due earlier, because a snapshot was dropped."""
        self.next = min(self.next, step)

    def likely(self, step: int) -> int:
        """Return the number of a step, at least `step`, after which a training forward will probably follow, judging by
        the latest ones."""
        return max(step, self.forward + self.group)
