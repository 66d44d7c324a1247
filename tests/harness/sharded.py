"""How a script begins that shards a small model within its island."""

SHARDED = """
import json, os, signal, sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
torch.set_num_threads(1)
dist.init_process_group("gloo")
number = int(os.environ["DADT_RANK"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 17), torch.nn.ReLU(), torch.nn.Linear(17, 3))
for layer in (model[0], model[2], model):
    fully_shard(layer)
"""
