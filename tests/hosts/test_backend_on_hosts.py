"""The torch.distributed backend over simulated machines."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from harness import lightened
from harness.patience import PATIENCE

DDP = """
import os, sys, torch, torch.distributed as dist{dadt}
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("dadt")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
found = {{}}
for backend in ("dadt", "gloo"):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(300, 100), process_group=dist.new_group(backend=backend))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 300)).square().mean().backward()
        optimizer.step()
    found[backend] = model.module.weight.detach()
torch.testing.assert_close(found["dadt"], found["gloo"], rtol=1e-5, atol=1e-6)
local = [dist.new_group([r for r in range(size) if r * 2 // size == host]) for host in range(2)]
mine = torch.tensor([rank])
dist.all_reduce(mine, group=local[rank * 2 // size])
other = torch.zeros(3) + rank
if rank in (0, size - 1):
    if rank: dist.send(other, 0)
    else: dist.recv(other, size - 1)
dist.barrier()
sys.stdout.write(f"{{found['dadt'].sum().item()}} {{mine.item()}} {{other[0].item():g}}\\n")
dist.destroy_process_group()
"""


def test_ddp_under_dadt_run(hosts, start):
    """With two ranks on each host: hierarchically."""
    each = 2
    network = hosts(2)
    script = DDP.format(dadt="")
    # Without injection DDP averages by itself.
    result = start(network, script, "-H", f"h0:{each},h1:{each}", "--inject", "none", "train.py").finish()
    assert result.code == 0, result.err
    said = sorted(line.split(b"] ")[0:1] + line.split(b"] ")[1].split() for line in result.out.splitlines())
    ranks = range(2 * each)
    assert [int(line[2]) for line in said] == [sum(r for r in ranks if r // each == rank // each) for rank in ranks]
    assert int(said[0][3]) == 2 * each - 1
    assert len({line[1] for line in said}) == 1


@pytest.mark.slow
def test_ddp_started_by_hand(hosts, tmp_path):
    network = hosts(2)
    (tmp_path / "train.py").write_text(lightened(DDP.format(dadt=", dadt")))
    meet = {"MASTER_ADDR": network.hosts[0].address, "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            host.enter([sys.executable, "train.py"], tmp_path),
            env={**os.environ, **meet, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(network.hosts)
    ]
    said = [rank.communicate(timeout=PATIENCE) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert [out.split()[1:] for out, _ in said] == [["0", "1"], ["1", "1"]]
    assert said[0][0].split()[0] == said[1][0].split()[0]
