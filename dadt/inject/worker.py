"""Makes this process a worker by installing all of DADT's hooks into torch."""

from __future__ import annotations

import atexit
import os
import sys
from functools import partial

import torch

from dadt import algorithms
from dadt import world as environment
from dadt.comm.peer_deaths import Abort
from dadt.comm.rendezvous.store_client import StoreClient
from dadt.config import Config
from dadt.control import machine
from dadt.control.agent_client import Control
from dadt.control.worker_line import WorkerLine
from dadt.errors import CommError, WeightsDiffer
from dadt.inject import (
    compiler,
    cuda_graphs,
    download,
    exit_code,
    failure,
    gradient,
    module,
    moved,
    optimizer,
    rank_watch,
    upload,
    weighed,
    within_backward,
)
from dadt.inject.data import entropy, hugging_face, loader, ray_batches, seed
from dadt.inject.data.parting import Parting
from dadt.inject.exit_text import ExitText
from dadt.inject.files import install as files
from dadt.inject.files import saving
from dadt.inject.files.unseen import unseen
from dadt.inject.replay import install as replay
from dadt.train.runtime import Runtime
from dadt.world import World

runtime: Runtime | None = None
"""The runtime of this process, once it is a worker; None before."""
modules: module.Modules | None = None
streams: seed.Streams | None = None


def start(world: World, *, explicit: bool = False) -> None:
    """Install all hooks. The job's ranks are connected later, when the script begins to train.

    explicit: the script calls `dadt.init`, and handles its data, seeds and files itself.
    """
    global runtime, modules
    if runtime is not None:
        return
    config = Config.from_env()
    control: WorkerLine | None = Control.connect(world)
    if control is None and world.launcher:
        control, config = _join(world, config)
        world = control.world
    if control is not None:
        control.hello(torch=torch.__version__)
    runtime = Runtime(world, config, control, algorithms.find)
    exit_text = ExitText()
    if control is not None:
        heard, unseen = (
            lambda: runtime.ranks.requests.interruption.heard > 0,
            lambda error: runtime.ranks.progress.unseen(error),
        )
        failure.install(control, lambda: runtime.ranks.step, heard, unseen)
    if world.agent:
        exit_text.install()
    modules = module.Modules(runtime)
    if not (explicit and runtime.ranks.alone):
        optimizer.install(runtime, modules)
        runtime.events.on_begin.append(compiler.look_past())
    if runtime.hooked:
        module.install(modules)
    if not runtime.ranks.alone:
        within_backward.install(runtime)
        moved.install(runtime)
        cuda_graphs.install(runtime)
        gradient.install(runtime, modules)
        if config.weigh != "samples":
            weighed.install(runtime)
    if not explicit:
        _install_around(runtime, modules)
    os.register_at_fork(after_in_child=runtime.resign)
    atexit.register(_end, runtime, exit_text)


def ask() -> Runtime:
    """Return the runtime for a script that calls `dadt.init`. Such a script keeps control of everything except
    training."""
    if runtime is None:
        world = World.from_env()
        start(world if world.job else World.from_launcher(), explicit=True)
    assert runtime is not None
    runtime.leave_to_script()
    if streams is not None and streams.enabled:
        streams.parting = parting = Parting(streams.rank)
        runtime.events.on_begin.append(parting.part)
    return runtime


def forget_seeds() -> None:
    """In a script that calls `dadt.init`, let each rank draw different random numbers, unless the script has set a
    seed."""
    if streams is not None and streams.parting is not None:
        (streams.parting.waive if streams.seeded else streams.parting.part)()


def watch_deaths(abort: Abort) -> None:
    """Register `abort`, which is called when a rank of the job has ended."""
    if runtime is not None:
        runtime.reports.listen()
        runtime.ranks.deaths.watch(abort)


def wrap(chosen: torch.optim.Optimizer) -> None:
    """Train with this optimizer on all ranks, in a script that calls `dadt.init`."""
    assert runtime is not None and modules is not None
    runtime.optimizers.enlist(chosen)
    if not runtime.ranks.alone:
        modules.find(chosen)


def average(chosen: torch.optim.Optimizer) -> None:
    """Put the averaged gradients of a wrapped optimizer into `.grad` before its step, because the script has requested
    them."""
    assert runtime is not None and modules is not None
    runtime.begin()
    attachment = runtime.attachment(chosen)
    if attachment is not None:
        gradient.average(runtime, modules, attachment)


def _install_around(runtime: Runtime, modules: module.Modules) -> None:
    """Install the hooks for everything that the script does besides training: data, seeds, files, downloads and
    replay."""
    global streams
    rank_watch.install(runtime)
    streams = mine = seed.install(runtime)
    if streams.enabled:
        runtime.checkpoints.streams = streams
    # A script that knows its rank and has set a seed chooses the random numbers of each rank itself.
    runtime.events.on_begin.append(lambda: None if mine.seeded and runtime.script.is_distributed else mine.split())
    if runtime.hooked:
        sources = entropy.install(runtime, streams)
        loaders = loader.install(runtime, streams, sources)
        runtime.events.on_stepped.append(lambda: sources.trained(loaders.gives_shares or runtime.script.fitting))
        hugging_face.install(runtime)
        ray_batches.install(runtime, runtime.ranks.config.min_np)
        overlay = files.install(runtime)
        saver = saving.install(runtime, overlay)
        runtime.events.on_regroup.append(saver.regrouped)
        if overlay is not None:
            runtime.ranks.progress.files_missed = overlay.missed
            runtime.ranks.progress.unseen = partial(unseen, overlay)
        download.install(runtime, overlay)
        upload.install(runtime)
        replay.install(runtime, modules, streams, overlay)


def _join(world: World, config: Config) -> tuple[StoreClient, Config]:
    """Connect to the other ranks that the same mpirun, srun or torchrun started. Return the connection and the
    configuration agreed on."""
    forum, agreed = StoreClient.connect(world, config)
    environment.adopt()
    # Scripts for torchrun choose a GPU by LOCAL_RANK. Other scripts use the first visible GPU, so one is made visible
    # to each rank.
    gpus = machine.gpus()
    if world.launcher != "torchrun" and config.gpu_visibility == "one" and len(gpus) > 1:
        environment.see(gpus[forum.world.local_rank % len(gpus)])
    if not environment.threads_chosen():
        torch.set_num_threads(max(1, machine.cores() // forum.world.local_size))
    return forum, agreed


def _end(runtime: Runtime, exit_text: ExitText) -> None:
    error = getattr(sys, "last_value", None)
    # All ranks stop for Ctrl-C after the same step, so they end together and none counts as failed.
    interruption = runtime.ranks.requests.interruption
    together = isinstance(error, KeyboardInterrupt) and interruption.heard and not interruption.apart
    failed = isinstance(error, BaseException) and not together
    try:
        if exit_text.text and runtime.ranks.control is not None and not failed:
            runtime.ranks.control.exits(exit_text.text, exit_text.frame, runtime.ranks.step)
        runtime.close(failed=failed)
    except WeightsDiffer as error:
        sys.excepthook(WeightsDiffer, error.with_traceback(None), None)
        if not exit_text.fails:
            exit_code.end_with(1)
    except CommError as error:
        # The other ranks raise the same error themselves; this rank exits with the exit code of its script.
        sys.stderr.write(f"dadt: rank {runtime.ranks.world.rank} ended: {error}\n")
