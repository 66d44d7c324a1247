"""How a script begins that shards a small model within its island."""

from __future__ import annotations

import json
import re
from typing import Any

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

PARTS = """
import atexit
def tell():
    parts = [getattr(p.detach(), "to_local", p.detach)().flatten() for p in model.parameters()]
    print("part", json.dumps([number, n, torch.cat(parts).tolist()]), flush=True)
atexit.register(tell)
"""
"""Comes before SHARDED, in a script that counts its steps in `n`. Registered before torch is imported, it tells a
rank's part of the weights after the last average, with which all algorithms make them equal."""


def parts(out: bytes) -> dict[int, Any]:
    """What PARTS has told, by rank; of the newest worker where there were several."""
    return {number: part for number, *part in map(json.loads, re.findall(r"part (.*)", out.decode()))}
