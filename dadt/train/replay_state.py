"""State of snapshots, and of a replay, which runs the script again up to the step of a snapshot."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from dadt.config.check import UNEQUAL
from dadt.train.ranks import Ranks


class ReplayState:
    """State of snapshots and of the replay that other training code reads. If the job uses no snapshots, the state
    never changes."""

    def __init__(self, ranks: Ranks) -> None:
        self._say = ranks.say
        asked = bool(ranks.config.resume or ranks.config.snapshot_dir)
        self.possible = asked and ranks.config.batch not in UNEQUAL
        """Whether this job resumes by replaying the script, or takes snapshots so that a later job can do so."""
        self.under_way = False
        """Whether a replay is running, in which ranks exchange nothing and train nothing."""
        self.goal_step = 0
        """The step at which the replay ends."""
        self.aside: Callable[[], AbstractContextManager[None]] = nullcontext
        """Function that returns a context in which DADT itself reads tensors, so that these reads are not recorded as
        the script's."""
        self.reported: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
        """Function that takes each tensor that DADT is about to return to the script, and returns it, or in a replay
        the recorded tensor in its place."""
        self.stop_snapshots: Callable[[], None] = lambda: None
        """Function that stops taking snapshots for the rest of the job."""

    def take_no_snapshots(self, why: str) -> None:
        """Stop taking snapshots, as a replay could not restore the script's state. why: the reason, for the user."""
        if self.possible:
            self.stop_snapshots()
            self._say(f"no snapshots are taken, as {why}", "warning")
