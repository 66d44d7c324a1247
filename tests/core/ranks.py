"""Processes as ranks, for the tests of the core."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from dadt import _core

TIMEOUT = 30.0


def _main(body: Callable[..., Any], rank: int, world_size: int, pipe: Connection, timeout: float, args: Any) -> None:
    try:
        executor = _core.ShmExecutor(rank, world_size)
        pipe.send(executor.endpoint())
        executor.connect(pipe.recv(), TIMEOUT)
        engine = _core.Engine(executor, rank, world_size, timeout)
        result = body(engine, rank, world_size, *args)
        pipe.send((result, None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))


def fresh_processes() -> Any:
    """For ranks that need torch: forked off a process that has nothing but it, which is much cheaper than `spawn`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.optim"])  # what every optimizer loads, and DDP
    return context


def spawn(world_size: int, body: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """What body(engine, rank, world_size, *args) returns in a process of its own for each rank. None for a rank
    that died without a word. `timeout` is the engines'."""
    context = multiprocessing.get_context("spawn")
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
            assert ours.poll(2 * TIMEOUT), f"rank {rank} is silent"
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
