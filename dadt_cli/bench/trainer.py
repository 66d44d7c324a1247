"""The script that `dadt bench MODEL` runs: trains when ordered to, and reports how long that took.

The script is plain PyTorch; the launcher and the option --peer decide whether training is data-parallel.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import psutil
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.utils.data import DataLoader

from dadt.config import Config
from dadt.config.link import pace_of, simulates_hosts
from dadt.control.pacing import paced
from dadt.errors import ConfigError, DadtError
from dadt.inject import worker
from dadt_cli.bench import models
from dadt_cli.bench.line import Hello, StepOrder, Worked, connect
from dadt_cli.bench.models.workload import Batch, Workload

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
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
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
            begun, own, cpu = perf_counter(), own_seconds(), process_time()
            for _ in range(turn.steps):
                self._step()
            self._finish()
            seconds = perf_counter() - begun
            return Worked(seconds, own_seconds() - own, process_time() - cpu, peak(self.device))

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


class Plain:
    """Training without code for any peer library: plain copies of the script, or the script with DADT injected."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))  # noqa: TID251 (torch's variable, not a knob)
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))  # noqa: TID251 (likewise)

    def wrap(self, model: nn.Module, optimizer: Any, accumulate: int) -> tuple[nn.Module, Any]:
        return model, optimizer

    def without_exchange(self, model: Any) -> AbstractContextManager[None]:
        """Return a context for every backward pass of a step but the last; gradients are not exchanged in this
        context."""
        return nullcontext()

    def turn(self) -> AbstractContextManager[None]:
        """Return a context for this worker's turn. Outside of it, while other contenders train, this worker must not
        use the processor."""
        return nullcontext()


def library(tensor: torch.Tensor) -> str:
    """Return the backend with which torch exchanges tensors on this device: NCCL if each worker has a GPU of its own,
    otherwise Gloo."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # noqa: TID251 (torch's variable)
    return "nccl" if tensor.is_cuda and local <= torch.cuda.device_count() else "gloo"


def join(tensor: torch.Tensor) -> None:
    """Connect this process with the other ranks by torch's process group for tensors such as this one; connections are
    slowed to the pace of --link."""
    config = Config.from_env()
    pace = pace_of(config.link)
    # Simulated hosts share the GPUs of this machine, and NCCL does not work with shared GPUs.
    one_machine = pace or simulates_hosts(config.link, config.latency, config.simulate_hosts)
    with paced(pace):
        torch.distributed.init_process_group("gloo" if one_machine else library(tensor))


class Ddp(Plain):
    """Trains with DistributedDataParallel, used as torch's documentation shows."""

    VIEW = False
    """Whether gradients are views of the buckets that are exchanged, which saves a copy."""

    def wrap(self, model: nn.Module, optimizer: Any, accumulate: int) -> tuple[nn.Module, Any]:
        join(next(model.parameters()))
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=self.VIEW)
        self.hook(wrapped)
        return wrapped, optimizer

    def hook(self, model: nn.parallel.DistributedDataParallel) -> None:
        """Register a hook that exchanges gradients in another way than DDP's default. This class registers none."""

    def without_exchange(self, model: Any) -> AbstractContextManager[None]:
        without: AbstractContextManager[None] = model.no_sync()
        return without


class DdpView(Ddp):
    VIEW = True


class DdpBf16(DdpView):
    def hook(self, model: nn.parallel.DistributedDataParallel) -> None:
        # DDP's named bf16 hook requires NCCL, but the function also works with Gloo, so it is registered directly.
        model.register_comm_hook(None, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))


class DdpPowerSgd(DdpView):
    def hook(self, model: nn.parallel.DistributedDataParallel) -> None:
        # Rank 1 is the first example in the documentation of PowerSGD's hook. 2 is the lowest valid
        # start_powerSGD_iter, and the warm-up covers the first 2 steps.
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class Bare(Plain):
    """A baseline: the script without averaging, plus a bare allreduce of as many bytes per step, on buffers that nobody
    reads or writes. Late averaging over the same library costs at least this much."""

    DTYPE: torch.dtype | None = None
    BUCKET = 25 << 20
    """Bytes of one bucket of gradients, which is also DDP's default."""

    def wrap(self, model: nn.Module, optimizer: Any, accumulate: int) -> tuple[nn.Module, Any]:
        first = next(model.parameters())
        join(first)
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        flat = torch.zeros(count, dtype=self.DTYPE or first.dtype, device=first.device)
        self._buckets = torch.split(flat, self.BUCKET // flat.element_size())
        self._works: list[Any] = []
        optimizer.register_step_pre_hook(lambda *_: self._exchange())
        return model, optimizer

    def _exchange(self) -> None:
        for work in self._works:
            work.wait()
        self._works = [torch.distributed.all_reduce(bucket, async_op=True) for bucket in self._buckets]


class BareBf16(Bare):
    DTYPE = torch.bfloat16


class Horovod(Plain):
    """Trains with Horovod's distributed optimizer as its documentation shows, over Gloo. Horovod's launcher knows no
    simulated hosts, so each rank sets Horovod's variables from those of `dadt run`."""

    def __init__(self) -> None:
        super().__init__()
        self._meeting, found = _meet_for_horovod(self.rank, self.ranks)
        os.environ.update(found)  # noqa: TID251 (Horovod's variables)
        self._hvd = importlib.import_module("horovod.torch")
        self._hvd.init()

    @contextmanager
    def turn(self) -> Iterator[None]:
        self._hvd.init()  # started only for this turn, since Horovod's thread wakes every millisecond even without work
        yield
        self._hvd.shutdown()

    def wrap(self, model: nn.Module, optimizer: Any, accumulate: int) -> tuple[nn.Module, Any]:
        self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        self._hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return model, self._hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=accumulate
        )


def _meet_for_horovod(rank: int, ranks: int) -> tuple[Any, dict[str, str]]:
    """Let the ranks find each other for Horovod. Returns the store and server, which must stay alive until all ranks
    have connected, and Horovod's environment variables."""
    env = os.environ  # noqa: TID251 (torch's variables)
    local_size, master = int(env["LOCAL_WORLD_SIZE"]), env["MASTER_ADDR"]
    plan = [
        {"size": ranks, "local_rank": r % local_size, "local_size": local_size, "cross_rank": r // local_size}
        | {"rank": r, "cross_size": ranks // local_size, "hostname": f"host{r // local_size}"}
        for r in range(ranks)
    ]
    store = torch.distributed.TCPStore(master, int(env["MASTER_PORT"]), ranks, is_master=rank == 0)  # type: ignore[attr-defined]
    server = None
    if rank == 0:
        server = importlib.import_module("horovod.runner.http.http_server").RendezvousServer()
        store.set("port", str(server.start()))
        slot = importlib.import_module("horovod.runner.common.util.hosts").SlotInfo
        server.init([slot(**each) for each in plan])
        store.set("ready", "")
    store.wait(["ready"])
    told = {"gloo_rendezvous_addr": master, "gloo_rendezvous_port": store.get("port").decode(), "controller": "gloo"}
    told |= {"cpu_operations": "gloo", "gloo_iface": _interface(master)}
    return (store, server), {f"HOROVOD_{name.upper()}": str(value) for name, value in (told | plan[rank]).items()}


def _interface(address: str) -> str:
    """Return the name of the network interface by which this host reaches the address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((address, 9))
        mine = way.getsockname()[0]
    return next(name for name, known in psutil.net_if_addrs().items() if mine in {each.address for each in known})


PEERS: dict[str, type[Plain]] = {
    "": Plain,
    "ddp": Ddp,
    "ddp-view": DdpView,
    "ddp-bf16": DdpBf16,
    "ddp-powersgd": DdpPowerSgd,
    "bare": Bare,
    "bare-bf16": BareBf16,
    "horovod": Horovod,
}


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
    """Return the seconds that DADT's hooks around steps have taken so far, waiting included; 0 without DADT."""
    return worker.runtime.ranks.progress.hook_seconds if worker.runtime is not None else 0.0


if __name__ == "__main__":
    try:
        main()
    except DadtError as error:
        raise SystemExit(f"dadt bench: {error}") from error
