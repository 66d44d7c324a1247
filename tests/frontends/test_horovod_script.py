"""Scripts for Horovod under `dadt run`, as they are."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from harness.run import Result

BODY = """
import hashlib, torch
from torch import nn
torch.set_num_threads(1)
{init}
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
{wrap}
generator = torch.Generator().manual_seed(7 + hvd.rank())
for step in range(30):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(torch.randn(16, 8, generator=generator)), torch.ones(16, 2)).backward()
{step}
print("ends with", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
"""
HOROVOD = """import horovod.torch as hvd
hvd.init()"""
WRAP = """hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())"""
CLIP = """    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()"""
CLIP_AS_HOROVOD = """    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()"""
OWN = """import dadt as hvd
hvd.init()"""


def digests(result: Result) -> set[bytes]:
    assert result.code == 0, result.err
    found = re.findall(rb"ends with (\w+)", result.out)
    assert len(found) == 2
    return set(found)


def script(init: str = HOROVOD, wrap: str = WRAP, step: str = "    optimizer.step()") -> str:
    return BODY.format(init=init, wrap=wrap, step=step)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("algorithm", ["sync", "pipe"])
def test_an_algorithm_trains_as_with_calls_of_dadt(launch, algorithm: str, clips: bool) -> None:
    options = ["-np", "2", "--algorithm", algorithm, "--warmup-steps", "5", "train.py"]
    step = {"step": CLIP} if clips else {}
    own = launch(script(OWN, "optimizer = hvd.DistributedOptimizer(optimizer)", **step), *options)
    theirs = launch(script(step=CLIP_AS_HOROVOD) if clips else script(), *options)
    assert f"horovod is not installed: DADT takes its place, with --algorithm {algorithm}" in theirs.err
    assert len(digests(own)) == 1
    assert digests(own) == digests(theirs)
    assert ("none delayed" in theirs.err) == (algorithm == "sync")


def test_it_averages_at_once_by_default(launch) -> None:
    """As under --algorithm sync, to the bit."""
    result = launch(script(), "-np", "2", "train.py")
    assert "with --algorithm sync" in result.err
    assert "none delayed" in result.err
    assert digests(result) == digests(launch(script(), "-np", "2", "--algorithm", "sync", "train.py"))


@pytest.mark.parametrize(
    ("call", "text"),
    [("op=hvd.Adasum", "op=hvd.Adasum"), ("process_set=hvd.add_process_set([0])", "process_set=")],
)
def test_what_an_algorithm_cannot_do_is_refused(launch, call: str, text: str) -> None:
    wrap = f"optimizer = hvd.DistributedOptimizer(optimizer, {call})"
    result = launch(script(wrap=wrap), "-np", "2", "--algorithm", "pipe", "train.py")
    assert result.code == 2
    assert text in result.err and "leave --algorithm pipe out" in result.err
    assert "Traceback" not in result.err


def test_no_horovod_leaves_it_out(launch) -> None:
    result = launch("import horovod.torch", "-np", "1", "--no-horovod", "train.py")
    assert result.code == 1
    assert "No module named 'horovod'" in result.err


def test_an_installed_horovod_is_left_alone(launch, tmp_path) -> None:
    (tmp_path / "packages/horovod").mkdir(parents=True)
    (tmp_path / "packages/horovod/torch.py").write_text("print('the real one')")
    (tmp_path / "packages/horovod/__init__.py").write_text("")
    result = launch("import horovod.torch", "-np", "1", "train.py", PYTHONPATH=str(tmp_path / "packages"))
    assert result.code == 0, result.err
    assert b"the real one" in result.out


@pytest.mark.parametrize("name", ["horovod", "horovod.torch", "horovod.torch.mpi_ops", "horovod.torch.elastic"])
def test_its_modules_are_found_under_both_names(launch, name: str) -> None:
    own = name.replace("horovod", "dadt.frontends.horovod", 1).removesuffix(".mpi_ops")
    text = f"import importlib, sys, {name}, {own}\n"
    text += f"assert sys.modules['{name}'] is sys.modules['{own}']\n"
    text += f"assert {own}.__spec__.name == '{own}', {own}.__spec__\n"
    text += "import horovod.torch as hvd, torch\nfrom horovod.common.exceptions import HorovodInternalError\n"
    text += "from horovod.torch.elastic import TorchState\nassert HorovodInternalError is hvd.HorovodInternalError\n"
    text += "assert 'torch' in sys.modules and hvd.size.__doc__\n"
    result = launch(text, "-np", "1", "train.py")
    assert result.code == 0, result.err


def test_what_is_not_there_is_said(launch) -> None:
    result = launch("import horovod.mxnet", "-np", "1", "train.py")
    assert result.code == 1
    assert "No module named 'horovod.mxnet'" in result.err


def test_a_process_alone_is_a_world_of_one(tmp_path) -> None:
    text = script(HOROVOD.replace("horovod.torch", "dadt.frontends.horovod.torch"))
    (tmp_path / "train.py").write_text(text + "assert hvd.size() == 1\nassert hvd.allreduce(torch.ones(1)) == 1\n")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "ends with" in done.stdout


def test_a_lost_rank_is_an_error_that_scripts_catch(launch) -> None:
    text = """
import os, signal, horovod.torch as hvd, torch
hvd.init()
hvd.barrier()
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    hvd.allreduce(torch.ones(1))
except hvd.HorovodInternalError as error:
    print("caught", error, flush=True)
    raise
"""
    result = launch(text, "-np", "2", "train.py")
    assert result.code == 128 + 9
    assert b"caught rank 1" in result.out, result.out
