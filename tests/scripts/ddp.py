"""A script for DistributedDataParallel as people write them: it knows its rank, and DADT knows nothing of it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
import torch.distributed as dist
from harness import light  # noqa: F401 (faster to start)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--init", default="env://")
parser.add_argument("--rank", type=int, default=-1)
parser.add_argument("--world_size", type=int, default=-1)
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--hook", action="store_true")
parser.add_argument("--out", required=True)
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(1)
dist.init_process_group("gloo", init_method=args.init, rank=args.rank, world_size=args.world_size)
rank, group = dist.get_rank(), dist.group.WORLD
if args.local_rank >= 0:
    assert args.local_rank == int(os.environ["LOCAL_RANK"])

data = TensorDataset(torch.randn(96, 6), torch.randint(0, 3, (96,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)))
if args.hook:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model.register_comm_hook(None, allreduce_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
samples = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        samples += len(x)
    schedule.step()
    model.eval()
    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(args.out, "model.pt"))
    dist.barrier()
assert samples == 3 * 96 // dist.get_world_size(), samples
dist.destroy_process_group()
torch.save(model.module.state_dict(), os.path.join(args.out, f"rank{rank}.pt"))
del model, group  # in this order: where a model in C++ is the last to own a group of Gloo's, torch may wait for ever
