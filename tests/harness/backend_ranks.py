"""Processes that stay, as ranks of one process group of backend `dadt`, for many tests one after the other."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dadt  # noqa: F401 (makes the backend known)
from harness.patience import PATIENCE
from harness.ranks import fresh_processes

Body = Callable[..., Any]


def _main(rank: int, size: int, meet: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("dadt", init_method=meet, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE))
    while (work := pipe.recv()) is not None:
        body, args = work
        try:
            pipe.send((body(*args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
    dist.destroy_process_group()
    pipe.send(None)
    os._exit(0)  # the interpreter's own end, which takes long with torch, is for the tests of scripts


class Ranks:
    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        context = fresh_processes()
        self._pipes = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_main, args=(rank, size, f"file://{folder}/meet", theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, body: Body, *args: Any) -> list[Any]:
        """What body(*args) returns on each rank; body is a function of a module."""
        for pipe in self._pipes:
            pipe.send((body, args))
        results = []
        errors = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(PATIENCE), f"rank {rank} is silent"
            result, error = pipe.recv()
            results.append(result)
            errors += [f"rank {rank}:\n{error}"] if error else []
        assert not errors, "\n".join(errors)
        return results

    def close(self) -> None:
        try:
            for pipe in self._pipes:
                pipe.send(None)
            for rank, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True)):
                assert pipe.poll(PATIENCE) and pipe.recv() is None, f"rank {rank} does not end"
                process.join(PATIENCE)
                assert process.exitcode == 0
        finally:
            for process in self._processes:
                process.kill()
                process.join()


def group(executor: str = "auto", ranks: list[int] | None = None, timeout: float = PATIENCE) -> Any:
    """A process group whose tensors an executor of choice moves; "torch": torch's own Gloo."""
    os.environ["DADT_EXECUTOR"] = "auto" if executor == "torch" else executor
    try:
        return dist.new_group(ranks, timedelta(seconds=timeout), "gloo" if executor == "torch" else "dadt")
    finally:
        del os.environ["DADT_EXECUTOR"]
