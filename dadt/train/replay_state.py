"""State of snapshots, and of a replay, which runs the script again up to a snapshot."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from dadt.config.check import UNEQUAL
from dadt.train.ranks import Ranks


class ReplayState:
    """State of snapshots and replay that other training code reads. Without snapshots, it never changes."""

    def __init__(self, ranks: Ranks) -> None:
        self._say = ranks.say
        asked = bool(ranks.config.resume or ranks.config.snapshot_dir)
        self.possible = asked and not ranks.world.island_size and ranks.config.batch not in UNEQUAL
        """Whether this job resumes by replaying the script, or takes snapshots so that a later job can do so."""
        self.under_way = False
        """Whether a replay is running, in which ranks exchange nothing and train nothing."""
        self.goal_step = 0
        """The step at which the replay ends."""
        self.aside: Callable[[], AbstractContextManager[None]] = nullcontext
        """Returns a context in which DADT itself reads tensors, so that the reads do not count as the script's."""
        self.reported: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
        """Called with each tensor that DADT returns to the script: returns the tensor itself, or in a replay the
        recorded one."""
        self.stop_snapshots: Callable[[], None] = lambda: None
        """Stops the taking of snapshots for the rest of the job."""

    def take_no_snapshots(self, why: str) -> None:
        """Stop taking snapshots, as a replay could not restore the script's state. why: the reason, for the user."""
        if self.possible:
            self.stop_snapshots()
            self._say(f"no snapshots are taken, as {why}", "warning")
