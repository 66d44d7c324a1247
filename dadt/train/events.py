"""Lists of callbacks that run at certain points of this rank's training. Callbacks of one event are called in the order
in which they were added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Callbacks = list[Callable[[], None]]


@dataclass
class Events:
    """The callbacks of one rank, by event. All of them run on the script's training thread."""

    on_place: Callbacks = field(default_factory=list)
    """Called when this rank begins to take part in training, before it connects with the other ranks."""
    on_claim: Callbacks = field(default_factory=list)
    """Called once this rank takes part in training, before optimizers are attached."""
    on_begin: Callbacks = field(default_factory=list)
    """Called before each forward in training mode, and before each use of gradients."""
    on_exchange: Callbacks = field(default_factory=list)
    """Called in each step before its exchange of gradients is launched."""
    on_stepped: Callbacks = field(default_factory=list)
    """Called after each complete optimizer step."""
    on_regroup: Callbacks = field(default_factory=list)
    """Called after a loss of ranks, once this rank is connected with the remaining ranks."""
    on_finish: Callbacks = field(default_factory=list)
    """Called at the end of the script, in the same order on all ranks."""
    on_end: Callbacks = field(default_factory=list)
    """Called after `on_finish`: what is left to do for optimizers, whether or not they still exist. Forgotten when all
    of them are detached and attached again, as a new worker that joins then knows nothing of it."""
    on_stop: Callbacks = field(default_factory=list)
    """Called when the process ends, also after a failure, once no messages are under way any more. Callbacks must end
    all threads that use torch, as the interpreter aborts the process if it exits before these threads end."""
