"""The peers of `dadt bench MODEL --against`: what trains them, by real ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness.patience import PATIENCE

from dadt_cli.bench.peer import PEERS, SHARDING
from dadt_cli.bench.trainer import PEERS as CLASSES

DDP = [name for name in PEERS if name.startswith("ddp")]
SCRIPT = """
import argparse, functools, hashlib, os, torch
from dadt_cli.bench import trainer
from dadt_cli.bench.line import StepOrder

def wide():
    def loss(model, x, y):
        return torch.nn.functional.mse_loss(model(x), y)

    return torch.nn.Linear(40, 40), lambda size: (torch.randn(size, 40), torch.randn(size, 40)), loss

if __name__ == "__main__":
    trainer.RATE = 0.1
    meet = torch.distributed.init_process_group
    for peer in PEERS:
        # One group after the other: a port would be taken for the last one's, as long as that listens.
        where = dict(init_method=f"file://{os.getcwd()}/{peer}", rank=int(os.environ["RANK"]), world_size=2)
        torch.distributed.init_process_group = functools.partial(meet, **where)
        torch.manual_seed(0)
        asked = argparse.Namespace(
            model="wide:wide", batch_size=4, device="cpu", precision="fp32", data="", peer=peer, accumulate=3, ranks=2
        )
        training = trainer.Training(asked)
        exchanges = []
        if peer == "ddp":
            training._model.register_comm_hook(None, lambda group, bucket: (
                exchanges.append(bucket.index()), trainer.default_hooks.allreduce_hook(group, bucket))[1])
        training.work(StepOrder(1, 4))
        if peer == "ddp":
            assert exchanges == [0] * 5, exchanges
        weight = training._workload.model.weight
        print("found", peer, hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest(), flush=True)
        torch.distributed.destroy_process_group()
    # Of torch 2.13: a process that has had DDP over Gloo sometimes aborts while libraries end, after all of Python has.
    os._exit(0)
"""


def test_each_name_has_a_class() -> None:
    assert set(CLASSES) == {"", *PEERS, *SHARDING} - {"sync"}


@pytest.mark.slow
def test_ranks_of_each_kind_of_ddp_stay_equal_and_exchange_once_a_step(tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(SCRIPT.replace("PEERS", repr(DDP)))
    done = subprocess.run(
        [sys.executable, "-m", "dadt_cli", "run", "-np", "2", "--inject", "none", "wide.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout
    found = [line.split()[-2:] for line in done.stdout.splitlines() if " found " in f" {line}"]
    weights = {peer: [each for name, each in found if name == peer] for peer in DDP}
    assert all(len(each) == 2 and each[0] == each[1] for each in weights.values()), done.stdout
    assert weights["ddp"] == weights["ddp-view"]
    assert len({each[0] for each in weights.values()}) == 3
