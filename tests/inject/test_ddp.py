"""Scripts that already use DistributedDataParallel, and their like: nobody changes them, and DADT averages."""

from __future__ import annotations

import gc
import os
import subprocess
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn  # whose functions otherwise keep the group as a default
from harness import SCRIPTS
from harness.checks import assert_equal
from harness.job import starter
from harness.patience import PATIENCE
from torch.nn.parallel import DistributedDataParallel as DDP

from dadt.inject.ddp import outlived_by_group

SCRIPT = SCRIPTS / "ddp.py"
PARTS = """
    import contextlib, copy, gc, io
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel as DDP
    from harness.scenarios import Branches, batch, mlp, use_second
    WRAPPED = {wrapped}
    if WRAPPED:
        dist.init_process_group("gloo")

    def wrap(model, **how):
        return DDP(model, **how) if WRAPPED else model

    def inside(model):
        return model.module if isinstance(model, DDP) else model

    def momentum(model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)

    def fit(model, step, part=0):
        x, y = batch(rank, step, part)
        F.cross_entropy(model(x), y).backward()

    def trained(model, optimizer=None, before=lambda step: None, after=lambda step: None, one=fit, steps=10):
        optimizer = optimizer or momentum(model)
        for step in range(steps):
            before(step)
            optimizer.zero_grad()
            one(model, step)
            after(step)
            optimizer.step()
        return model

    def plain():
        return trained(wrap(mlp()))

    def optimizer_first():
        model = mlp()
        optimizer = momentum(model)
        return trained(wrap(model), optimizer)

    def adam_zeroed():
        model = wrap(mlp(), gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(10):
            fit(model, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return model

    def accumulating():
        def one(model, step):
            with model.no_sync() if WRAPPED else contextlib.nullcontext():
                fit(model, step, 0)
                fit(model, step, 1)
            fit(model, step, 2)
        return trained(wrap(mlp()), one=one)

    def clipped():
        model = wrap(mlp(), gradient_as_bucket_view=True)
        return trained(model, after=lambda step: nn.utils.clip_grad_norm_(model.parameters(), 0.05))

    def bfloat16():
        def one(model, step):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                fit(model, step)
        return trained(wrap(mlp()), one=one)

    def scaled():
        model = wrap(mlp())
        optimizer, scaler = momentum(model), torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(10):
            optimizer.zero_grad()
            x, y = batch(rank, step, 0)
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return model

    def unused():
        model = wrap(Branches(), find_unused_parameters=True)
        return trained(model, before=lambda step: use_second(inside(model), rank, step))

    def static():
        return trained(wrap(mlp(), static_graph=True))

    def norms():
        return trained(wrap(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))))

    def in_part():
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = mlp(), nn.Linear(3, 3)
            def forward(self, x):
                return self.head(self.body(x))
        model = Net()
        optimizer = momentum(model)
        model.body, model.head = wrap(model.body), wrap(model.head)
        return trained(model, optimizer)

    def adversaries():
        one, two = wrap(mlp()), wrap(nn.Linear(3, 3))
        optimizers = [momentum(one), momentum(two)]
        for step in range(10):
            x, y = batch(rank, step, 0)
            for optimizer in optimizers:
                optimizer.zero_grad()
                F.cross_entropy(two(one(x)), y).backward()
                optimizer.step()
        return nn.ModuleList([one, two])

    def evaluating():
        model = wrap(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
        def look(step):
            model.eval()
            if rank == 0 and step:                  # by one rank, as scripts do: nobody else is waited for
                with torch.no_grad():
                    model(batch(0, step, 0)[0])
                torch.save(model.state_dict(), f"{{os.environ['OUT']}}/best.pt")
                pickled = io.BytesIO()
                torch.save(model, pickled)
                assert b"dadt" not in pickled.getvalue()
                assert "dadt" not in repr(vars(copy.deepcopy(model)))
            if WRAPPED:
                assert model.require_backward_grad_sync and model.require_forward_param_sync
            model.train()
        return trained(model, before=look) if {alone} else trained(model)

    def compiled():
        torch._dynamo.reset()
        return trained(torch.compile(wrap(mlp()), backend="eager"), steps=8)

    def wrapped_then_compiled():
        torch._dynamo.reset()
        model = mlp()
        optimizer = momentum(model)
        return trained(torch.compile(wrap(model), backend="eager"), optimizer, steps=8)

    states = {{}}
    parts = [plain, optimizer_first, adam_zeroed, accumulating, clipped, bfloat16, scaled, unused, static, norms,
             in_part, adversaries, evaluating]
    for part in [*parts, compiled, wrapped_then_compiled] if {compile} else parts:
        torch.manual_seed(0)
        model = part()
        for name, value in model.named_parameters():
            name = name.replace("module.", "").replace("_orig_mod.", "")
            states[part.__name__ + " " + name] = value.detach().clone()
        model.eval()
        for name, value in model.state_dict().items():
            if "running" in name and {alone}:
                states[part.__name__ + " " + name.replace("module.", "")] = value.clone()
        del model
        gc.collect()
    report(states)
"""


def parts(dadt_run, tmp_path: Path, *options: str, wrapped: bool = True, compile: bool = False):
    """Each part's weights, equal on both ranks; and the run."""
    script = PARTS.replace("{{os.environ['OUT']}}", str(tmp_path)).replace("{{}}", "{}")
    values = {"wrapped": wrapped, "compile": compile, "alone": "--inject" not in options}
    for name, value in values.items():
        script = script.replace(f"{{{name}}}", str(value))
    run = dadt_run(script, *options)
    assert_equal(run.ranks[0], run.ranks[1], "replicas")
    return run


def test_sync_gives_the_weights_that_ddp_gives(dadt_run, tmp_path) -> None:
    ours = parts(dadt_run, tmp_path, "--algorithm", "sync")
    theirs = parts(dadt_run, tmp_path, "--inject", "none").ranks[0]
    assert "gradients and buffers are averaged by --algorithm sync" in ours.output
    for name, value in theirs.items():
        close = 2e-3 if name.startswith("bfloat16") else 1e-5
        assert (value - ours.ranks[0][name]).abs().max() < close, name


@pytest.mark.slow
def test_pipe_gives_the_weights_of_the_script_without_ddp(dadt_run, tmp_path) -> None:
    ours = parts(dadt_run, tmp_path, "--warmup-steps", "3", compile=True)
    other = parts(dadt_run, tmp_path, "--warmup-steps", "3", wrapped=False, compile=True)
    assert_equal(ours.ranks[0], other.ranks[0], "with and without DDP")
    assert "in its place" in ours.output and "left alone" not in ours.output


def job(folder: Path, flags: list[str], arguments: list[str]) -> tuple[dict[str, torch.Tensor], str]:
    """The weights that the script ends with on all of its two ranks, and what DADT has said."""
    folder.mkdir()
    command = [
        *starter("dadt run", 2),
        *flags,
        str(SCRIPT),
        "--out",
        str(folder),
        *arguments,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=PATIENCE, env=env, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(folder.glob(".dadt*"))
    ranks = [torch.load(folder / name) for name in ("model.pt", "rank0.pt", "rank1.pt")]
    for other in ranks[1:]:
        assert_equal(ranks[0], other, "replicas")
    return ranks[0], done.stderr


@pytest.fixture(scope="module")
def by_ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return job(tmp_path_factory.mktemp("script") / "ddp", ["--inject", "none"], [])[0]


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        pytest.param(["--pass-local-rank"], [], marks=pytest.mark.slow),
        pytest.param(
            [],
            ["--init", "file://{folder}/meet", "--rank", "{rank}", "--world_size", "{world_size}"],
            marks=pytest.mark.slow,  # test_ddp_on_hosts.py has it, too
        ),
    ],
    ids=["with a rank argument", "by file"],
)
def test_a_script_as_people_write_them(tmp_path, by_ddp, flags: list[str], arguments: list[str]) -> None:
    arguments = [argument.replace("{folder}", str(tmp_path)) for argument in arguments]
    ours, said = job(tmp_path / "sync", ["--algorithm", "sync", *flags], arguments)
    for name, value in by_ddp.items():
        assert (value - ours[name]).abs().max() < 1e-5, name
    assert "shares out its data itself" in said and "in its place" in said


def test_a_script_under_pipe(tmp_path, by_ddp) -> None:
    ours, said = job(tmp_path / "pipe", ["--warmup-steps", "2"], [])
    assert "averaged by --algorithm pipe in its place" in said
    assert any((value - ours[name]).abs().max() > 1e-3 for name, value in by_ddp.items())


def test_a_hook_of_the_scripts_own(tmp_path, by_ddp) -> None:
    ours, said = job(tmp_path / "hook", ["--warmup-steps", "2"], ["--hook"])
    assert said.count("SGD is left alone: DistributedDataParallel averages its gradients by itself, with a") == 1
    for name, value in by_ddp.items():
        assert (value - ours[name]).abs().max() < 1e-5, name


LEFT = """
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel as DDP
    from harness.scenarios import batch, mlp, snapshot
    dist.init_process_group("gloo")
    def trained(model, optimizer, steps=6):
        for step in range(steps):
            x, y = batch(rank, step, 0)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return snapshot(model)
    torch.manual_seed(0)
    found = {}
    model = DDP(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    found["zero"] = trained(model, optimizer)
    model = DDP(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with model.join():                               # rank 1 has two more batches
        found["join"] = trained(model, optimizer, 6 + 2 * rank)
    model = nn.DataParallel(mlp())
    found["parallel"] = trained(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), 20)
    inner = mlp()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9)
    model = nn.DataParallel(inner)
    found["optimizer first"] = trained(model, optimizer, 20)
    report(found)
"""
LATE = """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    dist.init_process_group("gloo")
    def trained(model, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    model, found = DDP(nn.Linear(3, 1)), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trained(model, optimizer)
    try:
        with model.join():
            trained(model, optimizer)
    except Exception as error:
        found["late"] = str(error)
    report(found)
    os._exit(0)                                      # torch's join() waits for ranks that it was not told of
"""


def test_what_is_left_alone_and_what_is_not(dadt_run) -> None:
    """Also where ranks take other numbers of such steps, beside those that DADT averages."""
    run = dadt_run(LEFT, "--warmup-steps", "2")
    assert " ended: " not in run.output
    assert ": 40 steps, 36 of them delayed by one" in run.output
    for part in ("zero", "parallel", "optimizer first"):
        assert_equal(run.ranks[0][part], run.ranks[1][part], part)
    assert "ZeroRedundancyOptimizer is left alone: " in run.output
    assert "Adam is left alone: DistributedDataParallel averages its gradients by itself, with uneven" in run.output


@pytest.mark.slow
def test_a_join_that_comes_late(dadt_run) -> None:
    run = dadt_run(LATE, code=None)
    assert len(run.ranks) == 2, run.output
    assert all("join() of DistributedDataParallel after its first" in found["late"] for found in run.ranks)


UNEVEN = """
    import time
    import torch.distributed as dist
    from torch.distributed.algorithms.join import Join
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel as DDP
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    def trained(model, optimizer, steps):
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.full((2, 3), 0.1 * (step + 1))).pow(2).sum().backward()
            optimizer.step()
    if "{kind}" == "fsdp":
        fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        trained(model, optimizer, 4)
        for step in range(3 * rank):
            optimizer.step()
    else:
        model = DDP(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if "{kind}" == "zero":
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.05)
        with Join([model, optimizer] if "{kind}" == "zero" else [model]):
            trained(model, optimizer, 4 + 3 * rank)
    report([p.detach().sum().item() for p in model.parameters()] if "{kind}" != "fsdp" else [])
    dist.barrier()
    dist.destroy_process_group()
    if rank == 1:
        time.sleep(6)                                # longer than the others wait for what DADT averages
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--algorithm", "sync")], ids=["pipe", "sync"])
@pytest.mark.parametrize("kind", ["join", "zero", "fsdp"])
def test_each_rank_ends_when_it_does_where_all_is_left_alone(dadt_run, kind, options) -> None:
    run = dadt_run(UNEVEN.replace("{kind}", kind), "--timeout", "3", *options)
    assert run.ranks[0] == run.ranks[1]
    assert " is left alone: " in run.output and " ended: " not in run.output and " steps" not in run.lines()[-1]


def test_a_process_group_ends_after_the_model_that_used_it() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DDP(torch.nn.Linear(2, 2))
    outlived_by_group(model)
    ended: list[str] = []
    for name, part in (("group", model.process_group), ("reducer", model.reducer), ("logger", model.logger)):
        weakref.finalize(part, ended.append, name)
    dist.destroy_process_group()
    del model, part
    gc.collect()
    assert sorted(ended) == ["group", "logger", "reducer"] and ended[-1] == "group", ended
