"""Scripts that shard or average within an island, which DADT averages with the others: as one training of all ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch
from harness.patience import PATIENCE
from harness.run import Result

STEPS = 30
SCRIPT = """
import json, os, sys, torch, torch.distributed as dist
torch.set_num_threads(1)
kind = sys.argv[1]
dist.init_process_group("gloo")
number = int(os.environ.get("DADT_RANK") or os.environ["RANK"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 17), torch.nn.ReLU(), torch.nn.Linear(17, 3))  # 17: parts of two sizes
if kind in ("fsdp2", "hsdp"):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    shape, names = ((2, 2), ("host", "part")) if kind == "hsdp" else ((dist.get_world_size(),), ("part",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
elif kind == "fsdp1":
    from torch.distributed.fsdp import FullyShardedDataParallel
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
elif kind == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.{optimizer}
for step in range({steps}):
    generator = torch.Generator().manual_seed(100 * step + number)
    x, y = torch.randn(4, 8, generator=generator), torch.randint(0, 3, (4,), generator=generator)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    if "clip" in sys.argv:
        clip = getattr(model, "clip_grad_norm_", lambda most: torch.nn.utils.clip_grad_norm_(model.parameters(), most))
        clip(0.5)
    optimizer.step()
if kind == "fsdp1":
    with FullyShardedDataParallel.summon_full_params(model):
        weights = [p.detach().clone() for p in model.parameters()]
else:
    weights = [getattr(p.detach(), "full_tensor", p.detach)() for p in model.parameters()]
print("weights", json.dumps(torch.cat([p.flatten() for p in weights]).tolist()), flush=True)
dist.destroy_process_group()
"""
ADAMW = "AdamW(model.parameters(), lr=0.01)"
SGD = "SGD(model.parameters(), lr=0.1, momentum=0.9)"


def weights(result: Result, ranks: int = 4) -> torch.Tensor:
    """The weights at the end, which must be equal on all ranks."""
    assert result.code == 0, result.err
    found = [json.loads(each) for each in re.findall(r"weights (.*)", result.out.decode())]
    assert len(found) == ranks and all(each == found[0] for each in found), [each[:3] for each in found]
    return torch.tensor(found[0], dtype=torch.float64)


def alone(optimizer: str = ADAMW, ranks: int = 4, *, clip: bool = False) -> torch.Tensor:
    """The weights after a training by one process, on what all ranks train on."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 17), torch.nn.ReLU(), torch.nn.Linear(17, 3))
    made = eval(f"torch.optim.{optimizer}", {"torch": torch, "model": model})
    for step in range(STEPS):
        each = [torch.Generator().manual_seed(100 * step + rank) for rank in range(ranks)]
        pairs = [(torch.randn(4, 8, generator=g), torch.randint(0, 3, (4,), generator=g)) for g in each]
        x, y = (torch.cat(some) for some in zip(*pairs, strict=True))
        made.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        made.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double()


def run(launch: Callable[..., Result], kind: str, *options: str, optimizer: str = ADAMW, ranks: int = 4) -> Result:
    words = [each for each in options if not each.startswith("-")]
    given = [each for each in options if each.startswith("-")]
    script = SCRIPT.format(steps=STEPS, optimizer=optimizer)
    flags = [part for each in given for part in each.split("=")]
    return launch(script, "-np", str(ranks), "--island", "2", *flags, "train.py", kind, *words)


@pytest.mark.parametrize(
    ("kind", "optimizer", "clip"),
    [
        ("fsdp2", ADAMW, True),
        pytest.param("fsdp2", SGD, False, marks=pytest.mark.slow),
        pytest.param("fsdp1", ADAMW, True, marks=pytest.mark.slow),
        pytest.param("ddp", SGD, True, marks=pytest.mark.slow),
    ],
)
def test_they_train_as_one_process_would(launch, kind: str, optimizer: str, clip: bool) -> None:
    found = weights(run(launch, kind, "--algorithm=sync", *["clip"] * clip, optimizer=optimizer))
    torch.testing.assert_close(found, alone(optimizer, clip=clip), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "ddp"])
def test_they_train_as_torch_does_on_a_mesh_of_two_dimensions(launch, tmp_path: Path, kind: str) -> None:
    found = weights(run(launch, kind, "--algorithm=sync", "clip"))
    (tmp_path / "mesh.py").write_text(SCRIPT.format(steps=STEPS, optimizer=ADAMW))
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "4", "mesh.py", "hsdp", "clip"]
    done = subprocess.run(
        torchrun,
        cwd=tmp_path,
        env={**os.environ, "DADT_INJECT": "none"},
        capture_output=True,
        timeout=PATIENCE,
    )
    of_torch = weights(Result(done.returncode, done.stdout, done.stderr.decode(), tmp_path))
    torch.testing.assert_close(found, of_torch, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [ADAMW, pytest.param(SGD, marks=pytest.mark.slow)])
def test_late_averages_are_predicted_as_without_islands(launch, tmp_path: Path, optimizer: str) -> None:
    """Two islands of two ranks train as two ranks that each have an island's batch."""
    options = ["--warmup-steps=5", "--no-fall-back"]
    found = weights(run(launch, "fsdp2", *options, optimizer=optimizer))
    script = f"""
import json, os, torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 17), torch.nn.ReLU(), torch.nn.Linear(17, 3))
optimizer = torch.optim.{optimizer}
for step in range({STEPS}):
    each = [torch.Generator().manual_seed(100 * step + 2 * int(os.environ["RANK"]) + i) for i in range(2)]
    pairs = [(torch.randn(4, 8, generator=g), torch.randint(0, 3, (4,), generator=g)) for g in each]
    x, y = (torch.cat(some) for some in zip(*pairs))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
print("weights", json.dumps(torch.cat([p.flatten() for p in model.parameters()]).tolist()), flush=True)
"""
    whole = launch(script, "-np", "2", *[part for each in options for part in each.split("=")], "train.py")
    torch.testing.assert_close(found, weights(whole, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--algorithm=local", "--sync-every=4"],
        ["--algorithm=local", "--sync-every=4", "--outer-lr=0.7", "--outer-momentum=0.9"],
        ["--algorithm=gossip"],
        ["--compression=int8"],
        ["--compression=int4", "--algorithm=sync"],
        ["--compression=powersgd:2"],
        ["--verify-every=5"],
    ],
    ids=" ".join,
)
def test_every_way_to_average_trains(launch, options: list[str]) -> None:
    result = run(launch, "fsdp2", "--warmup-steps=5", *options)
    assert result.code == 0, result.err
    found = [torch.tensor(json.loads(each)) for each in re.findall(r"weights (.*)", result.out.decode())]
    assert len(found) == 4
    parted = "gossip" in options[0] or "local" in options[0]  # their last average comes after the script's end
    for each in found:
        assert (each - alone()).abs().max() < 1.0
        assert parted or torch.equal(each, found[0])


DATA = """
import json, os, sys, torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
torch.set_num_threads(1)
kind = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
if kind == "tensor parallel":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    parallelize_module(model, init_device_mesh("cpu", (2,)), {{"0": ColwiseParallel(), "2": RowwiseParallel()}})
else:
    from torch.distributed.fsdp import fully_shard
    model = torch.nn.Linear(1, 1)
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
data = TensorDataset(torch.arange(32.0).view(-1, 1))
sampler = DistributedSampler(data) if kind == "sampler" else None
{asks}
loader = DataLoader(data, 2, shuffle=sampler is None, sampler=sampler)
for epoch in range(2):
    if sampler is not None: sampler.set_epoch(epoch)
    seen = []
    for (x,) in loader:
        seen += x.flatten().tolist()
        optimizer.zero_grad(); model(x).pow(2).mean().backward(); optimizer.step()
    print("pass", epoch, json.dumps(seen), flush=True)
dist.destroy_process_group()
"""
HAND = 'data = torch.utils.data.Subset(data, range(int(os.environ["RA" "NK"]), 32, int(os.environ["WORLD_SIZE"])))'


@pytest.mark.parametrize(
    ("kind", "asks", "times"),
    [
        ("sampler", "", 1),
        pytest.param("plain", "", 1, marks=pytest.mark.slow),
        pytest.param("by hand", HAND, 1, marks=pytest.mark.slow),
        pytest.param("tensor parallel", "", 2, marks=pytest.mark.slow),
    ],
)
def test_each_sample_is_read_once_a_pass(launch, kind: str, asks: str, times: int) -> None:
    """By one rank; with tensor parallelism by all ranks of one island."""
    result = launch(DATA.format(asks=asks), "-np", "4", "--island", "2", "--algorithm", "sync", "train.py", kind)
    assert result.code == 0, result.err
    for epoch in range(2):
        passes = re.findall(rf"\[(\d)\] pass {epoch} (.*)", result.out.decode())
        seen = {int(rank): json.loads(text) for rank, text in passes}
        assert sorted(chain.from_iterable(seen.values())) == sorted([*range(32)] * times)
        if times == 2:
            assert seen[0] == seen[1] and seen[2] == seen[3]


CHECKPOINT = """
import os, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
for layer in (model[0], model[2], model): fully_shard(layer)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
saved = os.path.exists("saved/.metadata")
if saved:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id="saved")
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
for step in range(5, 10) if saved else range(5):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad(); model(x).pow(2).mean().backward(); optimizer.step()
if not saved:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id="saved")
    if dist.get_rank() == 0:
        with open("log.txt", "a") as log: print("saved", file=log)
    before = [p.full_tensor() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters(): p.zero_()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id="saved")
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    assert all(torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True))
    dist.barrier()
    assert sorted(os.listdir("saved")) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
print("weights", [round(float(p.full_tensor().double().sum()), 5) for p in model.parameters()], flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_checkpoint_is_written_once_and_loads_in_the_same_job_and_without_islands(launch, tmp_path: Path) -> None:
    options = ["-np", "4", "--island", "2", "--algorithm", "sync", "train.py"]
    result = launch(CHECKPOINT, *options)
    assert result.code == 0, result.err
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert (tmp_path / "log.txt").read_text() == "saved\n"
    found = weights(launch(CHECKPOINT, *options))
    plain = weights(launch(CHECKPOINT, "-np", "2", "--inject", "none", "train.py"), 2)
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["-np", "4", "--island", "3"], "--island 3: 4 workers cannot be divided by 3; give another number"),
        (["-np", "4", "--island", "some"], "--island some: give off, auto, host, or a number of workers"),
        (
            ["-np", "4", "--island", "2", "--min-np", "1", "--redistribute"],
            "--island 2: --redistribute does not know islands",
        ),
        (["-np", "4", "--island", "2", "--weigh", "tokens"], "--island 2: --weigh tokens does not know islands"),
    ],
)
def test_what_cannot_be_is_said(launch, options: list[str], text: str) -> None:
    result = launch("", *options, "train.py")
    assert result.code == 2 and text in result.err
