"""The libraries that average gradients in the workers of `dadt bench MODEL`, each used as its documentation shows."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from dadt.config import Config
from dadt.config.link import pace_of, simulates_hosts
from dadt.control.pacing import paced
from dadt.world import World
from dadt_cli.bench.transport_time import TransportThreads

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Plain:
    """Trains without another library: plain copies of the script, or the script with DADT injected."""

    def __init__(self) -> None:
        world = World.from_env()
        self.rank, self.ranks = world.rank, world.world_size
        self.threads = TransportThreads()

    def shard(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        """Shard the modules and then the model, by FSDP2. Without modules each worker holds the whole model."""
        if not modules:
            return
        from torch.distributed.fsdp import fully_shard  # exists from torch 2.6 on

        first = next(model.parameters())
        join(first)
        mesh = self.mesh(first.device.type)
        for module in (*modules, model):
            fully_shard(module, mesh=mesh)

    def mesh(self, device: str) -> DeviceMesh:
        """Return the device mesh over which the model is sharded: all ranks of torch's default process group."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device, (torch.distributed.get_world_size(),))

    def wrap(self, model: nn.Module, optimizer: Any, accumulate: int) -> tuple[nn.Module, Any]:
        return model, optimizer

    def without_exchange(self, model: Any) -> AbstractContextManager[None]:
        """Return a context manager for every backward pass of a step but the last, in which gradients are not
        exchanged."""
        return nullcontext()

    def turn(self) -> AbstractContextManager[None]:
        """Return a context manager for this worker's turn to train. Outside of it, while other contenders train, this
        worker must not use the processor."""
        return nullcontext()


def library(tensor: torch.Tensor) -> str:
    """Return the backend of torch.distributed for tensors on this device: NCCL if each worker has a GPU of its own,
    otherwise Gloo."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # noqa: TID251 (torch's variable)
    return "nccl" if tensor.is_cuda and local <= torch.cuda.device_count() else "gloo"


def join(tensor: torch.Tensor) -> None:
    """Initialize torch's process group with a backend for tensors on the device of `tensor`. Its connections are slowed
    if --link sets a pace."""
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


class Hsdp(Plain):
    """Shards the model within each host, and lets torch average between hosts, by a mesh of two dimensions."""

    def mesh(self, device: str) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        here = int(os.environ["LOCAL_WORLD_SIZE"])  # noqa: TID251 (torch's variable)
        return init_device_mesh(device, (self.ranks // here, here), mesh_dim_names=("host", "part"))


class Bare(Plain):
    """A baseline: the script without averaging, and in each step an allreduce of as many bytes as its gradients have,
    on buffers that are not used otherwise. Delayed averaging by the same library takes at least this long."""

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
    """Trains with Horovod's distributed optimizer as its documentation shows, over Gloo. Horovod's launcher does not
    support simulated hosts, so each rank sets Horovod's variables from those of `dadt run`."""

    def __init__(self) -> None:
        super().__init__()
        self._meeting, found = _meet_for_horovod(self.rank, self.ranks)
        os.environ.update(found)  # noqa: TID251 (Horovod's variables)
        self._hvd = importlib.import_module("horovod.torch")
        self._hvd.init()

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self.threads.starting():
            self._hvd.init()  # only for this turn, since Horovod's thread wakes every millisecond even without work
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
    "fsdp": Plain,
    "hsdp": Hsdp,
}
