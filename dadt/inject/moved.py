"""Handles modules that the script moves to another device between two steps, as by `model.cpu()` and `model.cuda()`
around a save."""

from __future__ import annotations

from typing import Any

from torch import nn

from dadt.inject.patch import replaces
from dadt.train.runtime import Runtime


def install(runtime: Runtime) -> None:
    """Patch the method behind `to`, `half`, `share_memory` and others: these methods move `.grad` to new memory, but
    DADT needs the gradients in the memory of its buckets."""
    moving = False

    @replaces("_apply", nn.Module)
    def apply(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal moving
        if moving:  # for a child module: the outermost call handles all
            return apply.__wrapped__(self, *args, **kwargs)
        moving = True
        try:
            return apply.__wrapped__(self, *args, **kwargs)
        finally:
            moving = False
            for attachment in runtime.attachments:
                # If the parameters are on the device for which the buckets were allocated, renew buckets from whose
                # memory gradients were moved.
                if attachment.alive and attachment.schema_is_current:
                    attachment.schema.look_for_moved()
