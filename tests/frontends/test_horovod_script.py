"""Scripts for Horovod under `dadt run`, as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import SCRIPTS, forkserver
from harness.patience import PATIENCE
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


@pytest.mark.sample(1)
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


@pytest.mark.slow
def test_it_averages_at_once_by_default(launch) -> None:
    """As under --algorithm sync, to the bit."""
    result = launch(script(), "-np", "2", "train.py")
    assert "with --algorithm sync" in result.err
    assert "none delayed" in result.err
    assert digests(result) == digests(launch(script(), "-np", "2", "--algorithm", "sync", "train.py"))


@pytest.mark.slow
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


@pytest.mark.sample(2)
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


@pytest.mark.slow
def test_a_folder_of_the_scripts_own_is_no_horovod(launch, tmp_path) -> None:
    (tmp_path / "horovod").mkdir()
    result = launch("import horovod.torch; print(horovod.__version__)", "-np", "1", "train.py")
    assert result.code == 0, result.err
    assert b"0.28.1" in result.out


def test_other_names_that_scripts_import(launch) -> None:
    text = """
from horovod.common.process_sets import global_process_set
from horovod.common.util import split_list, num_rank_is_power_2, gpu_available, env
from horovod.runner import run
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import allreduce_async_, synchronize
import horovod.torch as hvd
assert global_process_set is hvd.global_process_set and hvd.mpi_ops.size is hvd.size
assert split_list([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4, 5]] and num_rank_is_power_2(4) and not gpu_available()
"""
    result = launch(text, "-np", "1", "train.py")
    assert result.code == 0, result.err


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [False, True])
def test_random_numbers_are_the_scripts(launch, seeds: bool) -> None:
    """Seeded ones stay alike, also where the script has seeded before `init`; others differ from there on."""
    seed = "random.seed(1); numpy.random.seed(1); torch.manual_seed(1)" if seeds else "pass"
    text = f"""
import numpy, random, torch, horovod.torch as hvd
{seed}
hvd.init()
model = torch.nn.Linear(2, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
drawn = (random.random(), numpy.random.rand(), float(torch.rand(())))
assert len(set(hvd.allgather_object(drawn))) == {1 if seeds else 2}
assert len({{numbers[2] for numbers in hvd.allgather_object(drawn)}}) == {1 if seeds else 2}
"""
    result = launch(text, "-np", "2", "train.py")
    assert result.code == 0, result.err


@pytest.mark.slow
@pytest.mark.parametrize(("options", "code"), [([], 0), (["--timeout", "2"], 1)])
def test_a_busy_rank_is_waited_for_unless_a_limit_was_given(launch, options: list[str], code: int) -> None:
    text = """
import time, horovod.torch as hvd
hvd.init()
if hvd.rank() == 0:
    time.sleep(5)
hvd.barrier()
"""
    result = launch(text, "-np", "2", *options, "train.py")
    assert result.code == code, result.err


@pytest.mark.sample(1)
@pytest.mark.parametrize("visible", [None, "3,5"])
def test_the_gpus_of_the_host_are_visible(launch, tmp_path, visible: str | None) -> None:
    """Scripts for Horovod choose theirs by hvd.local_rank()."""
    text = """
import os, torch
before = os.environ.get("CUDA_VISIBLE_DEVICES")
import horovod.torch
print("saw", before, "sees", os.environ.get("CUDA_VISIBLE_DEVICES"))
"""
    from dadt.launch.hosts.slot import Slot
    from dadt.launch.start import environment

    slot = Slot(rank=1, world_size=2, local_rank=1, local_size=2, gpu="5")
    base = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    given = environment.own(slot, "job", None, told=False, restarts=0, joins=False)
    made = environment.of_worker(base, {**given, "DADT_HOROVOD": "sync"}, environment.SITE)
    assert made["CUDA_VISIBLE_DEVICES"] == "5"
    result = launch(text, "-np", "1", "train.py")
    assert b"saw None sees None" in result.out
    done = subprocess.run(
        [forkserver.python(), tmp_path / "train.py"],
        env={**os.environ, **{n: made[n] for n in ("CUDA_VISIBLE_DEVICES", "DADT_GPUS", "DADT_HOROVOD", "PYTHONPATH")}},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert f"saw 5 sees {visible}" in done.stdout, done.stderr


def test_what_is_not_there_is_said(launch) -> None:
    for name in ("horovod.mxnet", "horovod.mxnet.mpi_ops"):
        result = launch(f"import {name}", "-np", "1", "train.py")
        assert result.code == 1
        assert "No module named 'horovod.mxnet'" in result.err


def test_what_scripts_use_of_its_launcher(launch, tmp_path) -> None:
    """And the variables of a rank, before `init`. Horovod's source, not compiled, lies beside the script."""
    (tmp_path / "horovod" / "common").mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    (tmp_path / "horovod" / "common" / "basics.py").touch()
    text = """
import os, horovod.torch as hvd
from horovod.runner.util.threads import in_thread
assert (os.environ["HOROVOD_SIZE"], os.environ["HOROVOD_RANK"]) == ("2", os.environ["RANK"])
hvd.init()
seen = []
in_thread(seen.append, (hvd.rank(),)).join()
assert seen == [int(os.environ["HOROVOD_RANK"])]
if hvd.rank() == 0:
    import horovod, horovod.runner
    assert horovod.run is horovod.runner.run and horovod.run(lambda: 3, num_proc=1) == [3]
"""
    result = launch(text, "-np", "2", "train.py")
    assert result.code == 0, result.err


@pytest.mark.slow
def test_a_process_alone_is_a_world_of_one(tmp_path) -> None:
    text = script(HOROVOD.replace("horovod.torch", "dadt.frontends.horovod.torch"))
    (tmp_path / "train.py").write_text(text + "assert hvd.size() == 1\nassert hvd.allreduce(torch.ones(1)) == 1\n")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
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


def by_two(tmp_path: Path, name: str, *arguments: str, flags: tuple[str, ...] = ()) -> tuple[str, str]:
    """What a script of tests/scripts prints, and what all ranks end with."""
    command = [forkserver.dadt(), "run", "-np", "2", *flags, str(SCRIPTS / name), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    ends = re.findall(r"^\[\d\] ends with (.*)$", done.stdout, re.MULTILINE)
    assert len(ends) == 2 and ends[0] == ends[1], done.stdout
    return done.stdout, ends[0]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [[], ["--fp16-allreduce"], ["--use-adasum"]], ids=str)
def test_a_synthetic_benchmark(tmp_path: Path, options: list[str]) -> None:
    said, _ = by_two(tmp_path, "horovod_synthetic.py", *options)
    assert "[0] Number of CPUs: 2" in said
    assert re.search(r"^\[0\] Total img/sec on 2 CPU\(s\): [\d.]+ \+-[\d.]+$", said, re.MULTILINE), said


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [[], ["--fp16-allreduce", "--gradient-predivide-factor", "2"]], ids=str)
def test_images_with_warm_up_and_checkpoints(tmp_path: Path, options: list[str]) -> None:
    said, whole = by_two(tmp_path, "horovod_imagenet.py", *options)
    assert [float(a) for a in re.findall(r"accuracy ([\d.]+)", said)][-1] > 0.6, said
    assert sorted(path.name for path in tmp_path.glob("*.tar")) == [f"checkpoint-{n}.pth.tar" for n in (1, 2, 3)]
    (tmp_path / "checkpoint-3.pth.tar").unlink()
    said, resumed = by_two(tmp_path, "horovod_imagenet.py", *options)
    assert re.findall(r"epoch (\d)", said) == ["2"]
    assert abs(float(resumed) - float(whole)) < 0.02 * float(whole)


@pytest.mark.slow
def test_images_one_step_late(tmp_path: Path) -> None:
    said, _ = by_two(tmp_path, "horovod_imagenet.py", "--batches-per-allreduce", "1", flags=("--algorithm", "pipe"))
    assert [float(a) for a in re.findall(r"accuracy ([\d.]+)", said)][-1] > 0.5, said
