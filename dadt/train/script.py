"""Records what DADT knows about the user's script during training."""

from __future__ import annotations

import threading
import weakref

import torch

from dadt.world import World


class Script:
    """Facts about what the user's script has done so far, on which training depends."""

    def __init__(self, world: World) -> None:
        self.explicit = False
        """Whether the script has called `dadt.init`. If so, DADT manages only the optimizers that the script wraps."""
        self.knows_rank = world.rank_in_arguments
        """Whether the script has queried its rank, or has it in its command-line arguments."""
        self.divides_data = False
        """Whether the script has divided a data set by its rank, by a library function that does so."""
        self.backwards = 0
        """Number of backward passes that the script has begun."""
        self.began = False
        """Whether the script has run a training forward or used gradients."""
        self.fitting = False
        """Whether a framework's own training loop runs, in which all batches read with gradients enabled are for
        training."""
        self._distributed = False
        self._training_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    @property
    def is_distributed(self) -> bool:
        """Whether the script has distributed code of its own, because it calls `dadt.init`, or has a process group and
        knows its rank. The script then divides its data and saves files itself."""
        # The flag stays set after the script has destroyed its process group, as the script still saves by rank
        # afterwards.
        self._distributed |= torch.distributed.is_available() and torch.distributed.is_initialized()
        return self.explicit or (self._distributed and self.knows_rank)

    @property
    def on_training_thread(self) -> bool:
        """Whether optimizers were built or used on the current thread. Operations of such a thread come in the same
        order on all ranks, unlike those of other threads, such as one that reads batches ahead."""
        return threading.current_thread() in self._training_threads

    def trains_here(self) -> None:
        """Note that an optimizer is built or used on the current thread, which makes it a training thread."""
        self._training_threads.add(threading.current_thread())
