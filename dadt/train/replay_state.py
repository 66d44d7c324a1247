"""What training has to know of snapshots, and of a replay that brings the script back to one of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from dadt.config import Config


class ReplayState:
    """Without snapshots nothing here changes."""

    def __init__(self, config: Config) -> None:
        self.possible = bool(config.resume or config.snapshot_dir)
        """Whether the script is replayed, or may be later."""
        self.under_way = False
        """Whether the script comes to where it was before: nothing is exchanged, and nothing trained."""
        self.goal_step = 0
        """The step at which the replay ends."""
        self.aside: Callable[[], AbstractContextManager[None]] = nullcontext
        """Returns a context in which what is read from tensors is DADT's own business."""
        self.reported: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
        """Called with each tensor that DADT returns to the script: returns the tensor itself, or in a replay the
        recorded one."""
        self.stop_snapshots: Callable[[], None] = lambda: None
        """Ends the taking of snapshots, for the rest of the job."""
