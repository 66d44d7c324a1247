"""Checks that distributed training works on this host: runs a real job of two workers whose script does not import
DADT."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from dadt.errors import DadtError
from dadt.launch.start import environment
from dadt_cli.check_env.check import Check, CheckOptions, fail, good, refused, said, warn

STEPS = 3
MIB = 1 << 20
EXCHANGED_MIB = 64
ROUNDS = 7
START_SECONDS = 90.0
SETTINGS = {
    "algorithm": "sync",
    "inject": "auto",
    "output": "errors",
    "start_timeout": START_SECONDS,
    "timeout": START_SECONDS,
}
HINT = "dadt run -np 2 with a script of yours says more; its logs, too"


def checks(asked: CheckOptions) -> Iterator[Check]:
    if find_spec("torch") is None:
        yield warn("two workers", "not tried: there is no torch", "install torch first")
        return
    if environment.needs_sitecustomize("auto", os.environ):
        hint = "unset TORCH_DEVICE_BACKEND_AUTOLOAD, and take torch 2.5 or later: python -I ignores PYTHONPATH"
        yield warn("injection", "by PYTHONPATH", hint)
    else:
        yield good("injection", "by torch's entry point")
    # Two workers with tensors in host memory need no GPU of their own, so both may see all GPUs.
    settings: dict[str, Any] = {"executor": "shm", "launcher": "local", "gpu_visibility": "all"}
    yield train("two workers", asked, **settings)
    if asked.full:
        yield exchange("shared memory", 2, "", **settings)


def train(name: str, asked: CheckOptions, np: int = 2, hosts: str = "", **settings: Any) -> Check:
    """Check that ranks which start with different weights and different data end with the same weights."""
    begin = time.monotonic()
    weights = _job(name, _steps, np, hosts, settings)
    if isinstance(weights, Check):
        return weights
    seconds = time.monotonic() - begin
    if any(each != weights[0] for each in weights):
        hint = "TORCH_DEVICE_BACKEND_AUTOLOAD=0? a sitecustomize of your own? try dadt run --inject sitecustomize"
        return fail(name, f"trained each for itself: DADT did not get into them ({seconds:.1f} s)", hint)
    return good(name, f"{np} workers trained to the same weights ({seconds:.1f} s in all)")


def exchange(name: str, np: int, hosts: str, **settings: Any) -> Check:
    """Check how fast workers average a tensor of EXCHANGED_MIB MiB."""
    found = _job(name, _average, np, hosts, settings)
    if isinstance(found, Check):
        return found
    seconds = max(found)
    # Bus bandwidth as nccl-tests defines it: each rank sends at least 2 (n - 1) / n of the tensor's bytes.
    speed = 2 * (np - 1) / np * EXCHANGED_MIB * MIB / seconds
    return good(name, f"{EXCHANGED_MIB} MiB are averaged in {1e3 * seconds:.1f} ms, {speed / 1e9:.2f} GB/s each way")


def _job(name: str, function: Any, np: int, hosts: str, settings: dict[str, Any]) -> list[Any] | Check:
    """Run the function on `np` ranks. Returns the result of each rank, or a failed check if the job fails."""
    from dadt import run

    with tempfile.TemporaryDirectory() as logs:
        try:
            return run(function, np=np, hosts=hosts, log_dir=logs, **{**SETTINGS, **settings})
        except DadtError as error:
            return refused(name, str(error).strip().splitlines()[0], HINT)
        except Exception as error:  # noqa: BLE001 (the worker's own exception, such as a failed import of torch)
            return fail(name, said(error), HINT)


def _steps() -> list[float]:
    """Train a few steps as an ordinary script would, and return the weights; called in each worker."""
    import torch

    torch.manual_seed(int(os.environ["DADT_RANK"]))
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    return [float(value) for value in model.weight.detach().flatten()]


def _average() -> float:
    """Return the median seconds to average a tensor; called in each worker."""
    import statistics

    import torch

    import dadt

    dadt.init()
    tensor = torch.ones(EXCHANGED_MIB * MIB // 4)
    times = []
    for _ in range(ROUNDS):
        dadt.barrier()
        begin = time.perf_counter()
        dadt.all_reduce_(tensor, name="check-env")
        times.append(time.perf_counter() - begin)
    dadt.shutdown()
    return statistics.median(times)
