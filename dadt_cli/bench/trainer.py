"""The script that `dadt bench MODEL` runs: trains when it is told to, and says how long that took.

Plain PyTorch: whether it trains data-parallel is decided by how it is started, and by --peer.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from dadt.errors import ConfigError, DadtError
from dadt.inject import worker
from dadt_cli.bench import models
from dadt_cli.bench.line import Hello, Turn, Worked, connect
from dadt_cli.bench.models.workload import Batch, Workload

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
RATE = 1e-5
"""So low that nothing blows up: what it learns is of no interest."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), required=True)
    parser.add_argument("--precision", choices=("fp32", *DTYPES), required=True)
    parser.add_argument("--data", default="")
    parser.add_argument("--peer", choices=tuple(PEERS), default="")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--connect", required=True)
    asked = parser.parse_args()
    with connect(asked.connect) as line:
        try:
            training = Training(asked)
        except ConfigError as error:
            line.send({"refused": str(error)})
            return
        line.send({"hello": asdict(training.hello)})
        try:
            while (turn := line.recv()) is not None:
                line.send(asdict(training.work(Turn(**turn))))
        except (EOFError, ConnectionError):  # whoever measures is gone
            return


class Training:
    """One worker's model, optimizer and data. Raises ConfigError for what cannot be trained."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.device = device_of(asked.device)
        workload = models.make(asked.model)
        self._workload, self._peer = workload, PEERS[asked.peer]()
        if self._peer.ranks != asked.ranks:
            raise ConfigError(f"{asked.peer or 'the launcher'} has made {self._peer.ranks} of {asked.ranks} workers")
        count = sum(p.numel() for p in workload.model.parameters())
        model = workload.model.to(self.device)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        self._model, self._optimizer = self._peer.wrap(model, optimizer)
        self._batches = batches(workload, asked)
        self._loss: Callable[..., torch.Tensor] = workload.loss
        precision = asked.precision
        self._cast: Callable[[], Any] = (
            (lambda: torch.autocast(self.device.type, DTYPES[precision])) if precision in DTYPES else nullcontext
        )
        self._scaler = scaler(self.device) if precision == "fp16" else None
        self.hello = Hello(
            rank=self._peer.rank,
            threads=torch.get_num_threads(),
            device=self.device.type,
            source=workload.source,
            parameters=count,
            unit=workload.unit,
            per_sample=workload.per_sample,
        )

    def work(self, turn: Turn) -> Worked:
        """Some steps that are not counted, for what waits since the last turn, then those that are."""
        for _ in range(turn.lead):
            self._step()
        self._finish()
        begun, own = perf_counter(), own_seconds()
        for _ in range(turn.steps):
            self._step()
        self._finish()
        return Worked(perf_counter() - begun, own_seconds() - own, peak(self.device))

    def _step(self) -> None:
        batch = [part.to(self.device, non_blocking=True) for part in next(self._batches)]
        self._optimizer.zero_grad()
        with self._cast():
            loss = self._loss(self._model, *batch)
        if self._scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        else:
            self._scaler.scale(loss).backward()
            self._scaler.step(self._optimizer)
            self._scaler.update()

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Plain:
    """Nothing of the script's own: one process, or DADT around it."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))  # noqa: TID251 (torch's variable, not a knob)
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))  # noqa: TID251 (likewise)

    def wrap(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        return model, optimizer


class Ddp(Plain):
    """DistributedDataParallel, over NCCL on GPUs and Gloo elsewhere, as its documentation shows."""

    def wrap(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        cuda = next(model.parameters()).is_cuda
        torch.distributed.init_process_group("nccl" if cuda else "gloo")
        return nn.parallel.DistributedDataParallel(model), optimizer


class Horovod(Plain):
    """Its distributed optimizer, as its documentation shows."""

    def __init__(self) -> None:
        hvd = importlib.import_module("horovod.torch")
        hvd.init()
        self._hvd = hvd
        self.rank, self.ranks = int(hvd.rank()), int(hvd.size())

    def wrap(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        self._hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return model, self._hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


PEERS = {"": Plain, "ddp": Ddp, "horovod": Horovod}


def device_of(name: str) -> torch.device:
    """The GPU with this worker's number, unless it sees one alone. Raises ConfigError where there is none."""
    here = torch.cuda.is_available()
    if name == "cuda" and not here:
        raise ConfigError("--device cuda: torch finds no GPU that it can use here -> dadt check-env says why")
    if name == "cpu" or not here:
        return torch.device("cpu")
    names = ("LOCAL_RANK", "HOROVOD_LOCAL_RANK")
    local = int(next((os.environ[name] for name in names if name in os.environ), "0"))  # noqa: TID251 (of launchers)
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def batches(workload: Workload, asked: argparse.Namespace) -> Iterator[Batch]:
    """Without end: one made-up batch again and again, so that it costs nothing, or real ones from a DataLoader."""
    if not asked.data:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(os.getpid())  # or all ranks have the same, and DADT warns of it
            batch = workload.batch(asked.batch_size)
        return itertools.repeat(batch)
    if workload.real is None:
        raise ConfigError(f"--data {asked.data}: {asked.model} reads none; let its batch(size) do so")
    data: Any = workload.real(Path(asked.data))
    if len(data) < asked.batch_size * asked.ranks:
        few = f"{len(data)} samples are too few for {asked.ranks} x {asked.batch_size}"
        raise ConfigError(f"--data {asked.data}: {few}")
    return _passes(DataLoader(data, asked.batch_size, shuffle=True, drop_last=True))


def _passes(loader: DataLoader[Any]) -> Iterator[Batch]:
    while True:
        for batch in loader:
            yield tuple(batch)


def scaler(device: torch.device) -> Any:
    if hasattr(torch.amp, "GradScaler"):
        return torch.amp.GradScaler(device.type)
    if device.type == "cpu":
        raise ConfigError(f"--precision fp16 on a CPU needs torch 2.3, here is {torch.__version__}; try bf16")
    return torch.cuda.amp.GradScaler()


def peak(device: torch.device) -> int:
    """Bytes: of the GPU that torch has had in use at once, else of the host that this process has had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def own_seconds() -> float:
    """Seconds that DADT's hooks around steps have taken so far, waiting included; 0 without DADT."""
    return worker.runtime.progress.hook_seconds if worker.runtime is not None else 0.0


if __name__ == "__main__":
    try:
        main()
    except DadtError as error:
        raise SystemExit(f"dadt bench: {error}") from error
