"""torch.distributed's backend `dadt` with tensors of a GPU: over NCCL where each rank has one, else staged."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.patience import PATIENCE
from torch.distributed import FileStore

import dadt  # noqa: F401 (makes the backend known)
from dadt.comm.executors import c10d

SCRIPT = """
import sys, torch, torch.distributed as dist
import dadt
from torch.nn.parallel import DistributedDataParallel as DDP
rank, size, meet = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.cuda.set_device(0)
dist.init_process_group("dadt", init_method=meet, rank=rank, world_size=size)
gpu = torch.device("cuda")
is_nccl = "NCCL" in type(dist.group.WORLD._get_backend(gpu)).__name__
assert is_nccl == (size == 1), type(dist.group.WORLD._get_backend(gpu))
def on_gpu(*values): return torch.tensor(values, device=gpu, dtype=torch.float32)
t = on_gpu(rank + 1, 2); dist.all_reduce(t); assert t.tolist() == [sum(range(1, size + 1)), 2 * size]
t = on_gpu(rank, 5); dist.broadcast(t, size - 1); assert t.tolist() == [size - 1, 5]
t = on_gpu(rank + 1); dist.reduce(t, 0); assert rank or t.item() == sum(range(1, size + 1))
out = [on_gpu(0) for _ in range(size)]; dist.all_gather(out, on_gpu(rank))
assert [o.item() for o in out] == list(range(size))
flat = torch.empty(size, device=gpu); dist.all_gather_into_tensor(flat, on_gpu(rank))
assert flat.tolist() == list(range(size))
part = on_gpu(0); dist.reduce_scatter_tensor(part, on_gpu(*range(size))); assert part.item() == rank * size
part = on_gpu(0); dist.reduce_scatter(part, [on_gpu(r) for r in range(size)]); assert part.item() == rank * size
got = torch.empty(size, device=gpu); dist.all_to_all_single(got, on_gpu(*[10 * rank + r for r in range(size)]))
assert got.tolist() == [10 * r + rank for r in range(size)]
got = [on_gpu(0) for _ in range(size)]; dist.all_to_all(got, [on_gpu(10 * rank + r) for r in range(size)])
assert [g.item() for g in got] == [10 * r + rank for r in range(size)]
part = on_gpu(0); dist.scatter(part, [on_gpu(r) for r in range(size)] if rank == 0 else None, 0)
assert part.item() == rank
every = [on_gpu(0) for _ in range(size)] if rank == 0 else None; dist.gather(on_gpu(rank), every, 0)
assert rank or [e.item() for e in every] == list(range(size))
several = [on_gpu(1), on_gpu(2, 3)]
with dist._coalescing_manager(): [dist.all_reduce(t) for t in several]
assert several[1].tolist() == [2 * size, 3 * size]
if size == 2:
    t = on_gpu(7) if rank == 0 else on_gpu(0)
    dist.send(t, 1) if rank == 0 else dist.recv(t, 0)
    assert t.item() == 7
cpu = torch.ones(2); dist.all_reduce(cpu); assert cpu.tolist() == [size, size]
dist.barrier()
torch.manual_seed(rank)
model = DDP(torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5)).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad(); model(torch.randn(8, 10, device=gpu)).pow(2).mean().backward(); optimizer.step()
own = torch.cat([p.detach().flatten() for p in model.parameters()]); theirs = own.clone()
dist.broadcast(theirs, 0); assert own.equal(theirs)
dist.destroy_process_group()
print("DONE")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2])
def test_collectives_and_ddp(size: int, tmp_path: Path) -> None:
    """Alone over NCCL, two on one GPU through the host's memory."""
    command = [sys.executable, "-c", SCRIPT]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), f"file://{tmp_path}/meet"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert all(text.endswith("DONE\n") for text in outputs), "\n".join(outputs)


def test_verbs_of_gpus_are_those_of_a_process_group() -> None:
    """What NCCL is asked for exists in this torch by one of its names."""
    from dadt.comm.backend import process_group

    verbs = [name for name, each in vars(process_group.Backend).items() if hasattr(each, "__wrapped__")]
    assert len(verbs) > 20
    for name in verbs:
        name = getattr(process_group.Backend, name).__name__
        assert hasattr(dist.ProcessGroup, name) or hasattr(dist.ProcessGroup, process_group._EARLIER[name]), name


def test_an_exchange_by_way_of_a_device(tmp_path: Path) -> None:
    """Gloo in the place of NCCL, the CPU in that of a GPU."""
    size = 3
    store = FileStore(str(tmp_path / "store"), size)
    got: dict[int, list[list[int]]] = {}

    def rank_of(rank: int) -> None:
        group = c10d.gloo_group(store, "127.0.0.1", rank, size, 30.0)
        executor = c10d.C10d("gloo", group, rank, size, torch.device("cpu"))
        sends = [torch.full((rank * to,), 10 * rank + to, dtype=torch.uint8) for to in range(size)]
        receives = [torch.empty(source * rank, dtype=torch.uint8) for source in range(size)]
        executor.exchange(sends, receives)
        got[rank] = [each.tolist() for each in receives]
        executor.close()

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert got == {rank: [[10 * source + rank] * (source * rank) for source in range(size)] for rank in range(size)}
