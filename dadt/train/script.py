"""What is known of the user's script."""

from __future__ import annotations

import threading
import weakref

import torch

from dadt.world import World


class Script:
    """What the script has done so far that training depends on."""

    def __init__(self, world: World) -> None:
        self.explicit = False
        """Whether it has called `dadt.init`: nothing is DADT's business but the optimizers that it wraps."""
        self.knows_rank = world.rank_in_arguments
        """Whether it has asked which rank it is."""
        self.backwards = 0
        """Backward passes that it has begun."""
        self.began = False
        """Whether the script has run a training forward or used gradients."""
        self.fitting = False
        """Whether a framework's own loop trains: what is read with gradients is for that."""
        self._distributed = False
        self._training_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    @property
    def is_distributed(self) -> bool:
        """It has a process group and knows its rank, or calls `dadt.init`: what it shares out and saves is its own
        business."""
        # Remembered after the script has destroyed its process group, as it still saves by rank then.
        self._distributed |= torch.distributed.is_available() and torch.distributed.is_initialized()
        return self.explicit or (self._distributed and self.knows_rank)

    @property
    def on_training_thread(self) -> bool:
        """Whether optimizers were built or used on the current thread: its operations come in the same order on all
        ranks. Those of other threads, such as one that reads batches ahead, do not."""
        return threading.current_thread() in self._training_threads

    def trains_here(self) -> None:
        """An optimizer is built or used on this thread."""
        self._training_threads.add(threading.current_thread())
