"""The new workers of an island run their script again beside the running job, and take the place of a lost island
together: each gets its part of the model from a rank that holds the same one."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from harness.journal import EVENTS
from harness.patience import PATIENCE
from harness.sharded import PARTS, SHARDED, parts

# The loop ends 20 steps after as many new workers have joined as are to be lost: all ranks read the same number.
SCRIPT = f"""{SHARDED}{EVENTS}
import contextlib, subprocess, time
from functools import partial
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
joins = os.environ.get("DADT_JOINS") == "1"
kind, victims = sys.argv[1], [int(each) for each in sys.argv[2].split(",")]
again, meanwhile = (int(each) for each in sys.argv[3:])  # a new worker, and a rank that is lost before one has joined
if kind != "fsdp2":
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 18), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(18, 3)
    model = torch.nn.Sequential(*layers)
if kind == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
elif kind == "fsdp1":
    wrapped = lambda module, recurse, **_: recurse or isinstance(module, torch.nn.Linear)
    model = FSDP(model, auto_wrap_policy=wrapped, use_orig_params=True, device_id=torch.device("cpu"))
elif kind == "tensor":
    parallelize_module(model, dist.init_device_mesh("cpu", (2,)), {{"0": ColwiseParallel(), "3": RowwiseParallel()}})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30, gamma=0.9)

def goes_on(n):
    if not joins:
        time.sleep(0.05)  # the fewer steps a new worker has to make again
    lost = len(victims) + (meanwhile >= 0)
    if n and n % 10 == 0 and not os.path.exists("end") and len(events("join")) == 2 * lost:
        # for all islands, and whole
        subprocess.run(f"echo {{n + 20}} > end.{{number}} && ln end.{{number}} end", shell=True)
    if n and os.path.exists("end"):
        with open("end") as file:
            return n < int(file.read())
    return True

def dies(n):
    starts = [event["rank"] for event in events("started")]
    if n == 10 and number == again and starts.count(number) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if n >= 20 and n % 10 == 0:
        lost, half = divmod(len(events("join")), 2)  # rank by rank
        regroups = len(events("regroup"))
        if victims[lost : lost + 1] == [number] and not half and regroups == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == meanwhile and regroups == 1 and not lost:
            os.kill(os.getpid(), signal.SIGKILL)

clip = partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()))
if kind == "fsdp1":
    clip = model.clip_grad_norm_
n, norms, best, mean = 0, 0.0, 1e9, 0.0
while goes_on(n):
    drawn = torch.Generator().manual_seed(100 * n + (number // 2 if kind == "tensor" else number))
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8, generator=drawn)).pow(2).mean()
    loss.backward()
    norms += float(clip(0.5))
    optimizer.step()
    schedule.step()
    n += 1
    best = min(best, loss.item())
    both = loss.detach().clone()
    dist.all_reduce(both)  # within the island, as a script does that logs its loss
    mean += both.item()
    dies(n)
with FSDP.summon_full_params(model) if kind == "fsdp1" else contextlib.nullcontext():
    whole = [getattr(p.detach(), "full_tensor", p.detach)().flatten().clone() for p in model.parameters()]
states = [m for state in optimizer.state.values() for m in state.values() if m.dim()]
moments = [getattr(m, "full_tensor", lambda m=m: m)().flatten() for m in states if kind != "fsdp1"]
print("ends with", json.dumps([n, schedule.get_last_lr(), torch.cat([*whole, *moments]).tolist()]), flush=True)
dist.destroy_process_group()
"""
OPTIONS = ["--island", "2", "--min-np", "1", "--warmup-steps", "5", "--snapshot-every", "1000steps"]


def ends(result: Any, ranks: int) -> None:
    """All ranks with the same weights and state."""
    assert result.code == 0, result.err
    found = [json.loads(each) for each in re.findall(r"ends with (.*)", result.out.decode())]
    assert len(found) == ranks and all(each == found[0] for each in found), result.err


@pytest.mark.parametrize(
    ("kind", "options", "islands", "victims"),
    [
        ("fsdp2", (), 2, "3"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                ("fsdp2", ("--algorithm", "sync"), 2, "0"),
                ("fsdp2", ("--compression", "int8"), 2, "3"),
                ("fsdp2", (), 3, "1,4,0"),
                ("fsdp1", (), 2, "1"),
                ("tensor", (), 2, "2"),
                ("ddp", (), 2, "2"),
            ]
        ),
    ],
)
@pytest.mark.timeout(400)
def test_a_new_island_takes_the_place_of_a_lost_one(start, kind, options, islands, victims) -> None:
    result = start(SCRIPT, "-np", str(2 * islands), *OPTIONS, *options, "train.py", kind, victims, "-1", "-1").finish(
        3 * PATIENCE
    )
    ends(result, 2 * islands)
    for rank in map(int, victims.split(",")):
        island = f"ranks {rank - rank % 2} and {rank - rank % 2 + 1}"
        assert f"training goes on without the island of {island}" in result.err
        assert f"new workers start in place of {island}" in result.err


@pytest.mark.parametrize(
    ("kind", "islands", "victims"),
    [
        pytest.param("fsdp2", 2, "3", marks=pytest.mark.slow),
        pytest.param("fsdp2", 3, "1,4,0", marks=pytest.mark.slow),
        pytest.param("ddp", 2, "0", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(400)
def test_a_new_island_joins_islands_that_train_alone(start, kind: str, islands: int, victims: str) -> None:
    options = [*OPTIONS, "--algorithm", "local", "--sync-every", "4"]
    run = start(PARTS + SCRIPT, "-np", str(2 * islands), *options, "train.py", kind, victims, "-1", "-1")
    result = run.finish(3 * PATIENCE)
    assert result.code == 0 and "the checkpoint is one of" not in result.err, result.err
    assert result.err.count("new workers start in place of ranks") == len(victims.split(","))
    found = parts(result.out)
    assert found.keys() == set(range(2 * islands))
    assert all(part == found[number % 2] for number, part in found.items()), result.err


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_new_island_that_loses_a_worker_before_it_has_joined_begins_again(start) -> None:
    result = start(SCRIPT, "-np", "4", *OPTIONS, "train.py", "fsdp2", "3", "2", "-1").finish(3 * PATIENCE)
    ends(result, 4)
    assert result.err.count("new workers start in place of ranks 2 and 3") == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_another_island_may_be_lost_while_a_new_one_comes(start) -> None:
    result = start(SCRIPT, "-np", "6", *OPTIONS, "train.py", "fsdp2", "1", "-1", "4").finish(3 * PATIENCE)
    ends(result, 6)
    assert "new workers start in place of ranks 4 and 5" in result.err
