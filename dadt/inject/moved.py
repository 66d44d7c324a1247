"""Handles modules that are moved between two steps, as by `model.cpu()` and `model.cuda()` around a save."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from dadt.train.runtime import Runtime


def install(runtime: Runtime) -> None:
    """Patch the method behind `to`, `half`, `share_memory` and others: moving gives `.grad` new memory, while DADT
    needs it to lie in a bucket."""
    apply: Callable[..., nn.Module] = nn.Module._apply
    moving = False

    @functools.wraps(apply)
    def patched(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        nonlocal moving
        if moving:  # a child module's call inside the outermost call, which handles all modules
            return apply(self, *args, **kwargs)
        moving = True
        try:
            return apply(self, *args, **kwargs)
        finally:
            moving = False
            for attachment in runtime.attachments:
                # Parameters are on the device for which the buckets were allocated: renew buckets whose gradients were
                # moved away.
                if attachment.alive and attachment.schema_is_current:
                    attachment.schema.look_for_moved()

    nn.Module._apply = patched  # type: ignore[method-assign]
