"""Scripts that were told wrongly, or too late, what DADT makes of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest
from harness.checks import assert_replicas_equal
from harness.job import joined, starter
from harness.patience import PATIENCE

HEAD = """
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    generator = torch.Generator().manual_seed(rank)
    def batch():
        return torch.randn(8, 4, generator=generator)
"""
SUM = (
    HEAD
    + """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(12):
        optimizer.zero_grad()
        model(batch()).sum().backward()  # the gradient of the bias is 8 with any data
        optimizer.step()
    report({"state": model.state_dict()})
"""
)


ROWS = SUM.replace("nn.Linear(4, 1)", "nn.Sequential(nn.Embedding(8, 4), nn.Dropout(0.5), nn.Linear(4, 1))").replace(
    "model(batch())", "(model(torch.arange(8)) * batch()[:, :1])"
)
"""Inputs that stay the same are no data."""
BY_HAND = (
    HEAD
    + """
    import torch.distributed as dist
    dist.is_initialized() or dist.init_process_group("gloo")
    model = {model}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(12):
        optimizer.zero_grad()
        {loss}.backward()
        {average}
        optimizer.step()
    report({{"state": model.state_dict()}})
"""
)
EACH = "[dist.all_reduce(p.grad.div_(2)) for p in model.parameters()]"
FLAT = """flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        for p, part in zip(model.parameters(), flat.split([4, 1])):
            p.grad = part.view_as(p).div(world)"""
REPLICATE = "__import__('torch.distributed._composable.replicate', fromlist=['replicate']).replicate(nn.Linear(4, 1))"
LOSS = "model(batch()).pow(2).mean()"
FUNCTIONAL = "nn.functional.linear(batch(), model.weight, model.bias).pow(2).mean()"
OWN = "model(torch.full((8, 4), 1.0 + rank)).pow(2).mean()"


def test_of_data_that_differs_nothing_is_said(dadt_run) -> None:
    """Though one gradient is equal with any data, and gradients are equal that the script averages itself."""
    run = dadt_run(
        joined(
            sums=SUM,
            rows=ROWS,
            each=BY_HAND.format(model="model", loss=LOSS, average=EACH),
            flat=BY_HAND.format(model="model", loss=LOSS, average=FLAT),
            fixed=BY_HAND.format(model="model", loss=OWN, average=EACH),
            replicate=BY_HAND.format(model=REPLICATE, loss=LOSS, average="pass"),
        )
    )
    for name in ("sums", "rows", "each", "flat", "fixed", "replicate"):
        assert_replicas_equal(run.of(name))
    assert "warning" not in run.output


def test_of_equal_data_is_said_what_was_seen(dadt_run) -> None:
    same = SUM.replace("manual_seed(rank)", "manual_seed(0)")
    unseen = BY_HAND.format(model="model", loss=FUNCTIONAL, average=EACH)
    run = dadt_run(joined(same=same, unseen=unseen))
    assert "all ranks' models were given equal inputs for 5 steps: they train on the same data. Unless" in run.output
    assert run.output.count("they train on the same data") == 1
    assert "all ranks had equal gradients, in all values that were compared, for 5 steps" in run.output
    assert "or where the script averages them itself" in run.output


@pytest.mark.slow
def test_the_same_data_is_told_where_dropout_makes_gradients_differ(dadt_run) -> None:
    noisy = SUM.replace("nn.Linear(4, 1)", "nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1))")
    run = dadt_run(noisy.replace("manual_seed(rank)", "manual_seed(0)"))
    assert "equal inputs for 5 steps: they train on the same data, if their targets are equal, too" in run.output
    assert "equal inputs" not in dadt_run(noisy).output


ORDERS = """
    from torch.utils.data import DataLoader, TensorDataset
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(40, 1))
    mine = torch.randperm(40, generator=torch.Generator().manual_seed(rank)).tolist()
    if {splits}:
        data = torch.utils.data.Subset(data, mine[:30])
    loader = DataLoader(data, batch_size=5, shuffle=True{more})
    for _ in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
        if rank == {alone}:
            with torch.no_grad():
                list(DataLoader(data, shuffle=True))
    report({{"state": model.state_dict()}})
"""


@pytest.mark.parametrize(
    ("more", "alone", "splits", "told"),
    [
        ("", -1, False, False),
        ("", 0, False, True),
        (", generator=torch.Generator().manual_seed(rank)", -1, False, True),
        ("", -1, True, True),
    ],
    ids=["one order", "a pass alone", "a generator", "a split"],
)
def test_orders_that_differ_are_told(dadt_run, more: str, alone: int, splits: bool, told: bool) -> None:
    """Also where it is the second pass, as a rank has made one of another loader alone, and where ranks have split the
    data set otherwise, though they draw from their parts in one order."""
    run = dadt_run(ORDERS.format(more=more, alone=alone, splits=splits), "--warmup-steps", "2")
    assert_replicas_equal(run)
    assert ("DataLoader #1: ranks draw its samples in different orders" in run.output) is told


def test_what_steps_otherwise_is_told_at_the_first_steps(dadt_run) -> None:
    told = "10 backward passes, and there is no torch.optim.Optimizer"
    script = """
    import time
    from pathlib import Path
    for step in range(30):
        model(batch()).pow(2).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 1e-3 * p.grad
                p.grad = None
        if step == 20:
            events, = Path("dadt-logs").glob("*/events.jsonl")
            while TOLD not in events.read_text():
                time.sleep(0.01)
    """
    run = dadt_run(HEAD + script.replace("TOLD", repr(told)))
    assert run.output.count(f"dadt: warning: {told}") == 1


SCALAR = """
    scale = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([scale], lr=0.1)
    for step in range(12):
        optimizer.zero_grad()
        (scale * batch()).pow(2).sum().sub(scale).pow(2).backward()
        optimizer.step()
    report({"state": {"scale": scale.detach()}})
"""


def test_a_parameter_of_no_module_is_told_as_such(dadt_run) -> None:
    run = dadt_run(HEAD + SCALAR, "--warmup-steps", "4")
    assert_replicas_equal(run)
    assert "dadt: Adam: it trains no module: its gradients are delayed without prediction\n" in run.output
    assert "Compile the model" not in run.output


ORDERED = """
    from torch.utils.data import DataLoader, Sampler, TensorDataset
    class Backwards(Sampler):
        def __len__(self):
            return 32
        def __iter__(self):
            return iter(range(31, -1, -1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4, sampler=Backwards())
    loaders, size = {{"train": loader}}, len(loader.dataset)
    for x, in loader:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    other = DataLoader(loader.dataset, batch_size=4)
    with torch.no_grad():
        count = sum(len(x) for x, in other) / len(other.dataset)
    for _ in range(2):
        print(f"a share of {{count / {read}:.4f}}")
    report({{"state": model.state_dict()}})
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("read", ["len(loader.dataset)", "len(loader.sampler)", "len(loaders['train'].dataset)"])
def test_what_an_own_order_and_a_sum_over_a_share_are_called(dadt_run, tmp_path, read) -> None:
    run = dadt_run(HEAD + ORDERED.format(read=read))
    assert_replicas_equal(run)
    assert "dadt: DataLoader #1 (32 samples): trains, 16 per worker.\n" in run.output
    lines = (tmp_path / "train.py").read_text().splitlines()
    place = 1 + next(number for number, line in enumerate(lines) if "a share of" in line)
    what = read.replace("loaders['train']", "loader")
    told = f"DataLoader #1: {what} (train.py, line {place}) is 32, the samples of all 2 ranks"
    assert run.output.count(told) == run.output.count("is over 1/2 of them") == 1


TRACED = """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    same = []
    for step in range(12):
        x = batch()
        if step in (0, 8):  # as TensorBoard's add_graph does it
            traced = torch.jit.trace(model, x)
            with torch.no_grad():
                same.append(torch.equal(traced(x), model(x)))
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    report({"state": model.state_dict(), "same": torch.tensor(same)})
"""


def test_a_model_that_trains_can_be_traced(dadt_run) -> None:
    run = dadt_run(HEAD + TRACED, "--warmup-steps", "4")
    assert_replicas_equal(run)
    assert "12 steps, 8 of them delayed by one" in run.output
    assert run.ranks[0]["state"] and run.ranks[0]["same"].all()


OWN_SETUP = joined(own="raise RuntimeError('ProcessGroupNCCL is only supported with GPUs, no GPUs found!')")


def test_a_set_up_of_the_scripts_own_that_fails_names_the_way_around(dadt_run) -> None:
    hint = re.compile(r"^  hint    a script that finds RANK .*; --no-torch-env hides RANK$", re.M)
    assert hint.search(dadt_run(OWN_SETUP, code=None).output)
    assert not hint.search(dadt_run(OWN_SETUP, "--no-torch-env", code=None).output)
    assert not hint.search(dadt_run("raise RuntimeError('no such file')", code=None).output)


GROUP = (
    HEAD
    + """
    {first}
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for x, y in torch.utils.data.DataLoader(data, 4, shuffle=True):
        optimizer.zero_grad()
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()
    torch.save(model.state_dict(), f"state-{{os.getpid()}}.pt")
    print("weights", float(model.weight.sum()))
"""
)


@pytest.mark.parametrize(
    ("first", "steps", "told"),
    [
        ("torch.distributed.init_process_group('gloo')", 8, "trains, 32 per worker."),
        (
            "torch.distributed.init_process_group('gloo'); torch.distributed.get_rank()",
            16,
            "DataLoader #1: left as it is, as the script knows its rank and may share out its data itself",
        ),
    ],
)
def test_a_group_that_nobody_asks_for_the_rank_shares_nothing_out(tmp_path, first, steps, told) -> None:
    """As Accelerate makes it where there are no GPUs."""
    script = dedent(GROUP.format(first=first))
    (tmp_path / "train.py").write_text("import os\nimport torch\nfrom torch import nn\nrank = 0\n" + script)
    command = [*starter("dadt run", 2), "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert f": {steps} steps, " in done.stderr and told in done.stderr
    assert len({line[4:] for line in done.stdout.splitlines() if "weights" in line}) == 1


SCHEDULED = (
    HEAD
    + """
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps={steps} * 2 + 1)
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            (model(x) - y).pow(2).mean().backward()
            optimizer.step()
            schedule.step()
    report({{"state": model.state_dict(), "rate": schedule.get_last_lr()[0]}})
"""
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("steps", "told", "ends"), [("len(data) // 4", True, False), ("len(loader)", False, True)])
def test_a_schedule_that_is_too_long_is_told(dadt_run, steps, told, ends) -> None:
    run = dadt_run(SCHEDULED.format(steps=steps))
    assert_replicas_equal(run)
    assert ("DataLoader #1: 8 steps a pass in place of 16: a schedule computed from" in run.output) is told
    assert (run.ranks[0]["rate"] < 1e-4) is ends
    kept = dadt_run(SCHEDULED.format(steps=steps), "--batch", "global")
    assert "steps a pass in place of" not in kept.output and kept.ranks[0]["rate"] < 1e-4


LIBRARY = """
import os
seen = [os.environ.get("LOCAL_RANK"), "WORLD_SIZE" in os.environ, "RANK" in dict(os.environ), bool(os.getenv("HOME"))]
def own():
    os.environ["RANK"] = "7"
    return os.environ["RANK"]
"""


def printed(folder: Path, script: str, **libraries: str) -> str:
    """What a job of one rank prints whose script imports these libraries, given by their text."""
    for name, text in libraries.items():
        (folder / f"{name}.py").write_text(text)
    imports = f"import torch, os, sys\nsys.path.insert(0, os.getcwd())\nimport {', '.join(libraries)}\n"
    (folder / "train.py").write_text(imports + script)
    command = [*starter("dadt run", 1), "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_libraries_that_would_train_on_gpus_see_no_rank_where_there_are_none(tmp_path) -> None:
    script = "print(accelerate.seen, other.seen[1:], os.environ['RANK'] in '01', accelerate.own())\n"
    out = printed(tmp_path, script, accelerate=LIBRARY, other=LIBRARY)
    assert "[None, False, False, True] [True, True, True] True 7\n" in out


def test_a_library_that_divides_data_among_ranks_sees_them_where_the_script_has_a_process_group(tmp_path) -> None:
    library = "import os\ndef sees():\n    return 'RANK' in os.environ and 'WORLD_SIZE' in os.environ\n"
    script = "alone = webdataset.sees()\ntorch.distributed.init_process_group('gloo')\n"
    script += "print(alone, webdataset.sees(), os.environ['RANK'])\n"
    assert "False True 0\n" in printed(tmp_path, script, webdataset=library)
