"""A job in islands whose script saves nothing goes on from a snapshot, each rank from its own part of the model."""

from __future__ import annotations

import re
from typing import Any

import pytest

STEPS = 14
SCRIPT = f"""
import contextlib, os, signal, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
torch.set_num_threads(1)
dist.init_process_group("gloo")
number, (kind, dies) = int(os.environ["DADT_RANK"]), sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 240), nn.Dropout(0.1), nn.ReLU(), nn.Linear(240, 120), nn.Linear(120, 3))
if kind in ("fsdp2", "hsdp"):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "shards")) if kind == "hsdp" else None
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
elif kind in ("fsdp1", "flat"):
    wrapped = lambda module, recurse, **_: recurse or isinstance(module, nn.Linear)
    cpu = torch.device("cpu")
    model = FSDP(model, auto_wrap_policy=wrapped, use_orig_params=kind == "fsdp1", device_id=cpu)
elif kind == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
else:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {{"0": ColwiseParallel(), "3": RowwiseParallel()}})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, {STEPS})
norms, best, mean = 0.0, 1e9, torch.zeros(())
for step in range({STEPS}):
    drawn = torch.Generator().manual_seed(100 * step + (number // 2 if kind == "tensor" else number))
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8, generator=drawn)).pow(2).mean()
    loss.backward()
    if kind in ("fsdp2", "hsdp"):
        norms += float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    elif kind in ("fsdp1", "flat"):
        norms += model.clip_grad_norm_(0.5).item()
    best, mean = min(best, loss.item()), 0.9 * mean + 0.1 * loss.detach()
    if step == int(dies) and number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    schedule.step()
with FSDP.summon_full_params(model) if kind in ("fsdp1", "flat") else contextlib.nullcontext():
    whole = [getattr(p.detach(), "full_tensor", p.detach)().double() for p in model.parameters()]
sums = [sum(w.sum().item() for w in whole), sum(w.square().sum().item() for w in whole)]
print("rank", number, "ends with", *sums, norms, best, mean.item(), flush=True)
dist.destroy_process_group()
"""
OPTIONS = ["-np", "4", "--island", "2", "--warmup-steps", "5"]


def ends(result: Any) -> list[str]:
    assert result.code == 0, result.err
    return sorted(line.partition("rank ")[2] for line in result.out.decode().splitlines() if "ends with" in line)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("fsdp2", ()),
        *(
            pytest.param(kind, options, marks=pytest.mark.slow)
            for kind, options in [
                ("fsdp1", ()),
                ("flat", ()),
                ("ddp", ()),
                ("tensor", ()),
                ("fsdp2", ("--algorithm", "sync")),
                ("fsdp2", ("--compression", "int8")),
                ("fsdp2", ("--compression", "momentum:1")),
                ("flat", ("--compression", "int4")),
                ("fsdp2", ("--algorithm", "local", "--sync-every", "4")),
            ]
        ),
    ],
)
def test_a_resumed_job_ends_with_the_same_bits(launch, kind: str, options: tuple[str, ...]) -> None:
    whole = launch(SCRIPT, *OPTIONS, *options, "--snapshot-every", "4steps", "train.py", kind, "-1")
    expected = ends(whole)
    assert len(expected) == 4
    weights = [each.split()[3:5] for each in expected]
    assert weights.count(weights[0]) == 4 or "local" in options  # whose last average comes later
    resumed = launch(SCRIPT, *OPTIONS, *options, "--resume", whole.job, "train.py", kind, "-1")
    assert ends(resumed) == expected
    assert "resumed: 12 steps replayed" in resumed.err and "the checkpoint is one of" not in resumed.err


@pytest.mark.parametrize("options", [(), pytest.param(("--algorithm", "sync"), marks=pytest.mark.slow)])
def test_a_script_whose_mesh_spans_hosts_goes_on_too(launch, options: tuple[str, ...]) -> None:
    hybrid = ["-np", "4", "--warmup-steps", "5", *options]
    whole = launch(SCRIPT, *hybrid, "--snapshot-every", "4steps", "train.py", "hsdp", "-1")
    expected = ends(whole)
    assert len(expected) == 4 and "averaged between the 2 rows by --algorithm" in whole.err
    resumed = launch(SCRIPT, *hybrid, "--resume", whole.job, "train.py", "hsdp", "-1")
    assert ends(resumed) == expected
    assert "resumed: 12 steps replayed" in resumed.err


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), [("fsdp2", OPTIONS), ("hsdp", [*OPTIONS[:2], *OPTIONS[4:]])])
def test_snapshots_change_nothing(launch, kind: str, options: list[str]) -> None:
    without = launch(SCRIPT, *options, "train.py", kind, "-1")
    by_steps = launch(SCRIPT, *options, "--snapshot-every", "1steps", "train.py", kind, "-1")
    assert ends(by_steps) == ends(without)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), [("fsdp2", OPTIONS), ("hsdp", [*OPTIONS[:2], *OPTIONS[4:]])])
def test_a_job_that_may_restart_goes_on_from_its_snapshot(launch, kind: str, options: list[str]) -> None:
    """Without asking for snapshots; the script cannot have trained again from its top, as it dies in each attempt that
    comes to the step."""
    script = SCRIPT.replace("step == int(dies)", "step == int(dies) and not int(os.environ['DADT_RESTARTS'])")
    options = [*options, "--snapshot-every", "4steps"]
    undisturbed = launch(script, *options, "train.py", kind, "-1")
    restarted = launch(script, *options, "--max-restarts", "1", "train.py", kind, "10")
    assert ends(restarted) == ends(undisturbed)
    assert re.search(r"resumed: (4|8) steps replayed", restarted.err), restarted.err


@pytest.mark.slow
def test_fewer_islands_go_on_with_the_data_of_all(launch) -> None:
    loader = SCRIPT.replace(
        f"for step in range({STEPS}):",
        f"data = torch.utils.data.TensorDataset(torch.randn({STEPS} * 16, 8))\n"
        "loader = torch.utils.data.DataLoader(data, batch_size=4)\nread = 0\nfor step, (x,) in enumerate(loader):",
    ).replace("torch.randn(4, 8, generator=drawn)", "x")
    loader = loader.replace("optimizer.zero_grad()", "optimizer.zero_grad(); read += len(x)").replace(
        "*sums,", "*sums, read,"
    )
    whole = launch(loader, *OPTIONS, "--snapshot-every", "4steps", "train.py", "fsdp2", "-1")
    read = [int(each.split()[5]) for each in ends(whole)]
    assert read == [STEPS * 8] * 4  # ranks of an island read the same, as the script asks for its rank
    fewer = launch(loader, "-np", "2", *OPTIONS[2:], "--resume", whole.job, "train.py", "fsdp2", "-1")
    ended = ends(fewer)
    assert [int(each.split()[5]) for each in ended] == [STEPS * 16] * 2
    assert len({tuple(each.split()[3:5]) for each in ended}) == 1


def test_islands_of_another_size_are_refused(launch) -> None:
    script = SCRIPT.replace('kind in ("fsdp2", "hsdp")', "False").replace('kind == "ddp"', "True")
    whole = launch(script, "-np", "2", "--snapshot-every", "4steps", "train.py", "fsdp2", "-1")
    assert whole.code == 0, whole.err
    other = launch(script, "-np", "2", "--island", "2", "--resume", whole.job, "train.py", "fsdp2", "-1")
    assert other.code == 2
    assert "the snapshot is one of no islands, and this job has islands of 2 ranks" in other.err
