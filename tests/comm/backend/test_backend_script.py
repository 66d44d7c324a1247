"""Scripts as people write them, under each way to start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import forkserver, lightened
from harness.job import starter
from harness.patience import PATIENCE

from dadt.control.machine import free_ports

TOY = """
import os, sys
import torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
IMPORT
class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 5)
    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

def train(rank, size):
    MEET
    assert dist.get_backend() == "dadt"
    torch.manual_seed(rank)
    model = DDP(Toy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
        optimizer.step()
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = own.clone()
    dist.broadcast(first, 0)
    assert own.equal(first)
    checkpoint = sys.argv[1]
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), checkpoint)
    dist.barrier()
    model.load_state_dict(torch.load(checkpoint))
    os.write(1, f"trained {dist.get_rank()}\\n".encode())  # in one piece: both ranks write here
    END
"""
BY_ENVIRONMENT = 'dist.init_process_group("dadt", init_method="env://")'
DESTROY = "dist.destroy_process_group()"
SPAWN = """
if __name__ == "__main__":
    torch.multiprocessing.spawn(train, args=(2,), nprocs=2)
"""
CALL = "\ntrain(0, 2)\n"


def toy(meet: str, call: str, *, imported: bool = True, end: str = DESTROY) -> str:
    text = TOY.replace("IMPORT", "import dadt" if imported else "").replace("MEET", meet).replace("END", end)
    return text + call


def run(folder: Path, script: str, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    return subprocess.run(
        [*command, "train.py", str(folder / "model.pt")],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def port() -> str:
    return str(free_ports(1)[0])


def beside(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _trained(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert "trained 0" in done.stdout and "trained 1" in done.stdout
    assert "Traceback" not in done.stderr and "destroy_process_group" not in done.stderr, done.stderr


@pytest.mark.slow
def test_spawned_by_the_script(tmp_path: Path) -> None:
    """As torch's tutorial of DDP does it."""
    meet = f'os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="{port()}")\n'
    meet += '    dist.init_process_group("dadt", rank=rank, world_size=size)'
    _trained(run(tmp_path, toy(meet, SPAWN), [sys.executable]))


@pytest.mark.parametrize("end", [DESTROY, pytest.param("pass", marks=pytest.mark.slow)], ids=["", "group forgotten"])
def test_under_torchrun(tmp_path: Path, end: str) -> None:
    torchrun = [*starter("torchrun", 2), "--master-port", port()]
    # Imported with DADT_INJECT=none, DADT is the backend and nothing else.
    _trained(run(tmp_path, toy(BY_ENVIRONMENT, CALL, end=end), torchrun, DADT_INJECT="none"))


@pytest.mark.parametrize("end", [DESTROY, "pass"], ids=["", "group forgotten"])
def test_under_dadt_run_without_an_import(tmp_path: Path, end: str) -> None:
    alone = end != DESTROY  # what is left to the end of the interpreter
    script = toy(BY_ENVIRONMENT, CALL, imported=False, end=end)
    _trained(run(tmp_path, lightened(script) if alone else script, starter("dadt run", 2, alone)))


DYING = """
import os, torch, torch.distributed as dist, dadt
dist.init_process_group("dadt")
dist.all_reduce(torch.ones(3))
if dist.get_rank() == 1:
    os._exit(7)
try:
    dist.all_reduce(torch.ones(3))
except dist.DistError as error:
    print("told:", error, flush=True)
"""


def test_a_dead_rank_is_named(tmp_path: Path) -> None:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port(), "WORLD_SIZE": "2", "DADT_INJECT": "none"}
    (tmp_path / "train.py").write_text(DYING)
    ranks = [
        subprocess.Popen(
            [forkserver.python(), "train.py"],
            cwd=tmp_path,
            env={**os.environ, **variables, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 7], said
    assert "told: dadt: all_reduce: " in said[0] and "rank 1" in said[0], said
