"""State of snapshots, and of a replay, which runs the script again up to a snapshot."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from dadt.config import Config


class ReplayState:
    """State of snapshots and replay that other training code reads. Without snapshots, it never changes."""

    def __init__(self, config: Config) -> None:
        self.possible = bool(config.resume or config.snapshot_dir)
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
