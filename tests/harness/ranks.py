"""Processes as ranks, for the tests of the core."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from dadt import _core
from harness.patience import PATIENCE


def _main(body: Callable[..., Any], rank: int, world_size: int, pipe: Connection, timeout: float, args: Any) -> None:
    try:
        executor = _core.ShmExecutor(rank, world_size)
        pipe.send(executor.endpoint())
        executor.connect(pipe.recv(), PATIENCE)
        engine = _core.Engine(executor, rank, world_size, timeout)
        result = body(engine, rank, world_size, *args)
        pipe.send((result, None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))


PRELOADED = (
    *("torch._dynamo", "torch.distributed.optim"),  # what every optimizer loads, and DDP
    *("dadt.comm.backend.rendezvous", "dadt.comm.collectives.named", "dadt.comm.executors.hierarchical"),
    *("pytest", "numpy.typing", "dadt_cli.report.timeline"),  # of the modules of tests that ranks import
)


def fresh_processes() -> Any:
    """Forked off a process that has torch and nothing but it that the ranks could change: much cheaper than `spawn`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    return context


def printed(folder: Path, main: Callable[..., None], *ranks: tuple[Any, ...], deadline: float = 150.0) -> list[Ended]:
    """How main(*arguments) ends for each rank's arguments, in a process of its own."""
    context = fresh_processes()
    files = [folder / f"printed{rank}" for rank in range(len(ranks))]
    processes = [
        context.Process(target=_into, args=(file, main, arguments), daemon=True)
        for file, arguments in zip(files, ranks, strict=True)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + deadline
    try:
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        return [Ended(process.exitcode, file.read_text()) for process, file in zip(processes, files, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.join()


class Ended(NamedTuple):
    code: int | None
    """None of a process that has not ended within the deadline."""
    said: str


def _into(path: Path, main: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    main(*arguments)


def spawn(
    world_size: int, body: Callable[..., Any], *args: Any, timeout: float = PATIENCE, alone: bool = False
) -> list[Any]:
    """What body(engine, rank, world_size, *args) returns in a process of its own for each rank. None for a rank
    that died without a word. `timeout` is the engines'. alone: Python is started for each, so that none has torch."""
    context = multiprocessing.get_context("spawn") if alone else fresh_processes()
    pipes = [context.Pipe() for _ in range(world_size)]
    processes = [
        context.Process(target=_main, args=(body, rank, world_size, pipes[rank][1], timeout, args), daemon=True)
        for rank in range(world_size)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    try:
        endpoints = [ours.recv() for ours, _ in pipes]
        for ours, _ in pipes:
            ours.send(endpoints)
        results = []
        for rank, (ours, _) in enumerate(pipes):
            assert ours.poll(PATIENCE), f"rank {rank} is silent"
            try:
                result, error = ours.recv()
            except EOFError:
                result, error = None, None
            assert error is None, f"rank {rank}:\n{error}"
            results.append(result)
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()
