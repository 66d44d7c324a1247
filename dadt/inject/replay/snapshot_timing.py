"""Decides after which steps snapshots are taken. All ranks decide alike, as each step means the same on all of them."""

from __future__ import annotations

import sys


class SnapshotTiming:
    """Chooses the steps with snapshots: every `steps` steps, later if none can be taken, and soon again if one is
    dropped."""

    def __init__(self, steps: int) -> None:
        """steps: number of steps between two snapshots; 0 as long as it is unknown."""
        self.steps = steps
        self.next = steps or sys.maxsize
        """The step after which the next snapshot is taken, at the earliest."""
        self.forward = self.group = 0
        """`forward`: the step after which the last training forward began. `group`: the number of steps between the
        last two steps with forwards."""
        self._due = 0
        """The step for which a delayed snapshot was due; 0 if none is delayed."""

    def goes_on_from(self, step: int) -> None:
        """Continue after a replay up to this step."""
        self.next = step + self.steps if self.steps else sys.maxsize
        self.forward = step

    def takes(self, step: int, most_late: int, *, possible: bool, rests: bool) -> bool:
        """Return whether a snapshot is taken after this step, which is complete; call it if `next` has come.

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
        """Called when a training forward begins. step: the number of steps taken before it."""
        if step != self.forward:
            self.group, self.forward = step - self.forward, step

    def retry(self, step: int) -> None:
        """Take the next snapshot after this step if none is due before, since one was dropped."""
        self.next = min(self.next, step)

    def likely(self, step: int) -> int:
        """Return the step after `step` that a training forward will probably follow, judging by the previous ones."""
        return max(step, self.forward + self.group)
