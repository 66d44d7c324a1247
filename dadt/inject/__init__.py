"""How DADT gets into a script: torch calls `hook` at the end of `import torch` (entry point `torch.backends`)."""

from __future__ import annotations

import sys
from typing import Any

asked_for = False
"""Whether the program imports dadt itself, which under mpirun, srun or torchrun is what makes it train
data-parallel."""
_MULTIPROCESSING = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "multiprocessing.spawn")


def hook() -> None:
    """Hook into the script that imports torch, if it is a worker: of `dadt run`, or of another launcher where the
    script imports dadt. Does nothing otherwise, and nothing in a child that multiprocessing made (a DataLoader's
    worker): those are no ranks."""
    from dadt.config import Config
    from dadt.world import World

    world = World.from_env()
    if not world.job and not asked_for:
        _forget()
        return
    _offer_backend()
    if _is_multiprocessing_child():
        return
    if not world.job:
        _hook_elsewhere()
        return
    try:
        if Config.from_env().inject != "none":
            from dadt.inject import worker

            worker.start(world)
    except Exception as error:  # noqa: BLE001 (whatever it is, it ends this worker)
        _end_by(error)


def _end_by(error: Exception) -> None:
    """Show the error and end this worker: torch's import would turn an exception into another one, with the advice to
    turn DADT off."""
    sys.last_value = error
    sys.excepthook(type(error), error, error.__traceback__)
    raise SystemExit(1)


def _offer_backend() -> None:
    """Register the backend, so that init_process_group("dadt") works from here on, also in child processes."""
    import torch.distributed as dist

    def create(options: Any, own: Any) -> Any:
        from dadt.comm.backend import process_group
        from dadt.inject import worker

        return process_group.create(options, own, worker.watch_deaths)

    if dist.is_available():
        dist.Backend.register_backend("dadt", create, extended_api=True, devices=["cpu", "cuda"])


def _hook_elsewhere() -> None:
    """Start training under another launcher, such as torchrun or mpirun. Does nothing in a world of one, or in a
    program that has imported dadt_cli."""
    from dadt.config import Config
    from dadt.errors import DadtError
    from dadt.world import World

    world = World.from_launcher()
    if world.world_size == 1 or "dadt_cli" in sys.modules:
        return
    try:
        if Config.from_env().inject != "none":
            from dadt.inject import worker

            worker.start(world)
    except DadtError as error:
        # Nobody else says it, and out of torch's import only this comes as it is.
        sys.stderr.write(f"dadt: rank {world.rank}: {error}\n")
        raise SystemExit(error.exit_code) from error


def _forget() -> None:
    """Remove dadt from the imported modules, so that a later import of it by the script is noticed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "dadt"]:
        del sys.modules[name]


def _is_multiprocessing_child() -> bool:
    # Not by multiprocessing.parent_process(): importing multiprocessing here would alter what scripts see of it.
    return "--multiprocessing-fork" in sys.orig_argv or any(
        name in argument for argument in sys.orig_argv[1:3] for name in _MULTIPROCESSING
    )
