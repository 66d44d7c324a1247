"""Entry point of DADT in a script: torch calls `hook` at the end of `import torch` (entry point group
`torch.backends`)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dadt.world import World

asked_for = False
"""Whether the program itself imports dadt. Only then does DADT train a program that mpirun, srun or torchrun has
started."""
_MULTIPROCESSING = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "multiprocessing.spawn")


def hook() -> None:
    """Start DADT in the script that imports torch, if this process is a worker of `dadt run`, or of another launcher
    whose script imports dadt. In other processes, and in children of multiprocessing (such as a DataLoader's worker
    processes), it does not start DADT, because they are no ranks.
    """
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
        _start(world)
    except Exception as error:  # noqa: BLE001 (whatever it is, it ends this worker)
        _end_by(error)


def _start(world: World) -> None:
    from dadt.config import Config

    if Config.from_env().inject != "none":
        from dadt.inject import worker

        worker.start(world)


def _end_by(error: Exception) -> None:
    """Print the error and exit this worker with status 1. If the error were raised, torch's import would turn it into
    another error, with the advice to turn DADT off."""
    sys.last_value = error
    sys.excepthook(type(error), error, error.__traceback__)
    raise SystemExit(1)


def _offer_backend() -> None:
    """Register the torch.distributed backend "dadt", so that init_process_group("dadt") works in this process and in
    its child processes."""
    import torch.distributed as dist

    def create(options: Any, own: Any) -> Any:
        from dadt.comm.backend import process_group
        from dadt.inject import worker

        return process_group.create(options, own, worker.watch_deaths)

    if dist.is_available():
        dist.Backend.register_backend("dadt", create, extended_api=True, devices=["cpu", "cuda"])


def _hook_elsewhere() -> None:
    """Start DADT in a worker of another launcher, such as torchrun or mpirun. Does nothing if there is only one rank,
    or in a program that has imported dadt_cli."""
    from dadt.errors import DadtError
    from dadt.world import World

    world = World.from_launcher()
    if world.world_size == 1 or "dadt_cli" in sys.modules:
        return
    try:
        _start(world)
    except DadtError as error:
        # Print the error, because nothing else reports it: only SystemExit leaves the import of torch without being
        # replaced by another error.
        sys.stderr.write(f"dadt: rank {world.rank}: {error}\n")
        raise SystemExit(error.exit_code) from error


def _forget() -> None:
    """Remove dadt from sys.modules, so that DADT notices when the script imports dadt later."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "dadt"]:
        del sys.modules[name]


def _is_multiprocessing_child() -> bool:
    # The command line is examined instead of multiprocessing.parent_process(), because DADT would have to import
    # multiprocessing, which the script could notice.
    return "--multiprocessing-fork" in sys.orig_argv or any(
        name in argument for argument in sys.orig_argv[1:3] for name in _MULTIPROCESSING
    )
