"""What is called when something happens to this rank, in the order in which it was added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Callbacks = list[Callable[[], None]]


@dataclass
class Events:
    """The callbacks of one rank. All run on the training thread."""

    on_place: Callbacks = field(default_factory=list)
    """Called before the rank is claimed."""
    on_claim: Callbacks = field(default_factory=list)
    """Called before optimizers are attached."""
    on_begin: Callbacks = field(default_factory=list)
    """Called at every training forward, and where gradients are used."""
    on_exchange: Callbacks = field(default_factory=list)
    """Called before a step launches anything."""
    on_stepped: Callbacks = field(default_factory=list)
    """Called when a step is complete."""
    on_skipped: Callbacks = field(default_factory=list)
    """Called when all ranks have left a step out."""
    on_regroup: Callbacks = field(default_factory=list)
    """Called when others were lost, once this rank is connected with those that are left."""
    on_end: Callbacks = field(default_factory=list)
    """Called when the script has ended, whatever has become of its optimizers: in one order on all ranks."""
    on_stop: Callbacks = field(default_factory=list)
    """Called last, also after a failure: messages under way have failed, and threads that use torch end here, as the
    interpreter aborts the process where it ends and they do not."""
