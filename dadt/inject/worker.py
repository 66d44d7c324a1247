"""Makes this process a worker: everything that is hooked into torch, in one place."""

from __future__ import annotations

import atexit
import os
import sys

import torch

from dadt.config import Config
from dadt.control import Control
from dadt.errors import CommError
from dadt.inject import download, failure, gradient, loader, module, optimizer, saving, seed
from dadt.runtime import Runtime
from dadt.world import World

runtime: Runtime | None = None
"""This process's, once it is a worker."""


def start(world: World) -> None:
    """Install all hooks. Claims nothing: that happens when the script begins to train."""
    global runtime
    if runtime is not None:
        return
    control = Control.connect(world)
    if control is not None:
        control.hello(torch=torch.__version__)
    config = Config.from_env()
    runtime = Runtime(world, config, control)
    if control is not None:
        failure.install(control, lambda: runtime.step)
    streams = seed.install(runtime)
    runtime.on_begin.append(streams.split)
    modules = module.Modules(runtime)
    optimizer.install(runtime, modules)
    if not runtime.alone:
        module.install(modules)
        gradient.install(runtime, modules)
        loader.install(runtime, streams)
        saving.install(runtime)
        download.install(runtime)
    os.register_at_fork(after_in_child=runtime.resign)
    atexit.register(_end, runtime)


def _end(runtime: Runtime) -> None:
    failed = isinstance(getattr(sys, "last_value", None), BaseException)
    try:
        runtime.close(failed=failed)
    except CommError as error:
        # The peers raise the same where they stand; this rank's exit code is its script's own.
        sys.stderr.write(f"dadt: rank {runtime.world.rank} ended: {error}\n")
