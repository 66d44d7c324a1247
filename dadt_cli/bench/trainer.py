"""The script that `dadt bench MODEL` runs: trains when ordered to, and reports how long that took.

The script is plain PyTorch; the launcher and the option --peer decide whether training is data-parallel.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from torch.utils.data import DataLoader

from dadt.errors import ConfigError, DadtError
from dadt.inject import worker
from dadt_cli.bench import models
from dadt_cli.bench.libraries import PEERS
from dadt_cli.bench.line import Hello, StepOrder, Worked, connect
from dadt_cli.bench.models.workload import Batch, Workload
from dadt_cli.bench.transport_time import between

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
RATE = 1e-5
"""Learning rate, so low that values cannot overflow. What the model learns does not matter in a benchmark."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="", help="of the contender, for whoever lists jobs")
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), required=True)
    parser.add_argument("--precision", choices=("fp32", *DTYPES), required=True)
    parser.add_argument("--data", default="")
    parser.add_argument("--peer", choices=tuple(PEERS), default="")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--connect", required=True)
    asked = parser.parse_args()
    with connect(asked.connect) as line:
        try:
            training = BenchTraining(asked)
        except ConfigError as error:
            line.send(error)
            return
        line.send(training.hello)
        try:
            while (turn := line.recv()) is not None:
                line.send(training.work(turn))
        except (EOFError, ConnectionError):  # the process that measures has ended, so no more orders will come
            return


class BenchTraining:
    """One worker's model, optimizer and data. Raises ConfigError if the task cannot be trained."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.device = device_of(asked.device)
        workload = models.make(asked.model)
        self._workload, self._peer, self._accumulate = workload, PEERS[asked.peer](), asked.accumulate
        if self._peer.ranks != asked.ranks:
            raise ConfigError(f"{asked.peer or 'the launcher'} has made {self._peer.ranks} of {asked.ranks} workers")
        count = sum(p.numel() for p in workload.model.parameters())
        model = workload.model.to(self.device)
        self._peer.shard(model, workload.shards)
        optimizer: Any = optimizer_of(asked.optimizer, model.parameters())
        self._model, self._optimizer = self._peer.wrap(model, optimizer, asked.accumulate)
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
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
            source=workload.source,
            parameters=count,
            unit=workload.unit,
            per_sample=workload.per_sample,
        )

    def work(self, turn: StepOrder) -> Worked:
        """Train uncounted steps, which finish exchanges left over from the last turn, and after them measured steps.
        Returns the measurements."""
        with self._peer.turn():
            for _ in range(turn.lead):
                self._step()
            self._finish()
            transport = self._peer.threads.seconds()
            begun, own, cpu = perf_counter(), own_seconds(), process_time()
            for _ in range(turn.steps):
                self._step()
            self._finish()
            seconds = perf_counter() - begun
            own, cpu = own_seconds() - own, process_time() - cpu
            return Worked(seconds, own, cpu, peak(self.device), between(transport, self._peer.threads.seconds()))

    def _step(self) -> None:
        self._optimizer.zero_grad()
        for _ in range(self._accumulate - 1):
            with self._peer.without_exchange(self._model):
                self._backward()
        self._backward()
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()

    def _backward(self) -> None:
        batch = [part.to(self.device, non_blocking=True) for part in next(self._batches)]
        with self._cast():
            loss = self._loss(self._model, *batch) / self._accumulate
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def optimizer_of(name: str, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer that --optimizer names."""
    if name == "adam":
        return torch.optim.Adam(parameters, lr=RATE)
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def device_of(name: str) -> torch.device:
    """Return this worker's device for --device: the GPU numbered by its local rank, or the CPU. Raises ConfigError if a
    GPU is demanded and there is none."""
    here = torch.cuda.is_available()
    if name == "cuda" and not here:
        raise ConfigError("--device cuda: torch finds no GPU that it can use here -> dadt check-env says why")
    if name == "cpu" or not here:
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))  # noqa: TID251 (torch's variable)
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def batches(workload: Workload, asked: argparse.Namespace) -> Iterator[Batch]:
    """Return an endless iterator of batches: one synthetic batch repeated, which costs no time, or with --data real
    batches from a DataLoader."""
    if not asked.data:
        with torch.random.fork_rng(devices=[]):
            # Each process has a seed of its own, since DADT warns if all ranks train on the same data.
            torch.default_generator.manual_seed(os.getpid())
            batch = workload.batch(asked.batch_size)
        # The memory is pinned, since otherwise the host would wait for each copy to the GPU.
        if asked.device != "cpu" and torch.cuda.is_available():
            batch = tuple(part.pin_memory() for part in batch)
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
    """Return the peak memory in bytes: of the GPU as torch counts it, otherwise of this process on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def own_seconds() -> float:
    """Return the seconds that DADT's hooks around steps have taken so far, including waits for other ranks; 0 without
    DADT."""
    return worker.runtime.ranks.progress.hook_seconds if worker.runtime is not None else 0.0


if __name__ == "__main__":
    try:
        main()
    except DadtError as error:
        raise SystemExit(f"dadt bench: {error}") from error
