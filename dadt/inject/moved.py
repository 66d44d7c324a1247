"""Handles modules that are moved between two steps, as by `model.cpu()` and `model.cuda()` around a save."""

from __future__ import annotations

from typing import Any

from torch import nn

from dadt.inject.patch import replaces
from dadt.train.runtime import Runtime


def install(runtime: Runtime) -> None:
    """Patch the method behind `to`, `half`, `share_memory` and others: moving gives `.grad` new memory, while DADT
    needs it to lie in a bucket."""
    moving = False

    @replaces("_apply", nn.Module)
    def apply(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal moving
        if moving:  # a child module's call inside the outermost call, which handles all modules
            return apply.__wrapped__(self, *args, **kwargs)
        moving = True
        try:
            return apply.__wrapped__(self, *args, **kwargs)
        finally:
            moving = False
            for attachment in runtime.attachments:
                # Parameters are on the device for which the buckets were allocated: renew buckets whose gradients were
                # moved away.
                if attachment.alive and attachment.schema_is_current:
                    attachment.schema.look_for_moved()
