"""How DADT gets into a script: torch calls `hook` at the end of `import torch` (entry point `torch.backends`)."""

from __future__ import annotations

import sys

_MULTIPROCESSING = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "multiprocessing.spawn")


def hook() -> None:
    """Hook into the script that imports torch. Does nothing outside a worker of `dadt run`, and nothing in a child
    that multiprocessing made (a DataLoader's worker): those are no ranks."""
    from dadt.config import Config
    from dadt.world import World

    world = World.from_env()
    if not world.job or _is_multiprocessing_child() or Config.from_env().inject == "none":
        return
    from dadt.inject import worker

    worker.start(world)


def _is_multiprocessing_child() -> bool:
    # Not by multiprocessing.parent_process(): importing multiprocessing here would alter what scripts see of it.
    return "--multiprocessing-fork" in sys.orig_argv or any(
        name in argument for argument in sys.orig_argv[1:3] for name in _MULTIPROCESSING
    )
