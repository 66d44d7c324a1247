"""Checks whether torch can be imported, and how it was built."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import time
from collections.abc import Iterator

from dadt_cli.check_env.check import Check, CheckOptions, fail, good, said, warn

NEEDED, CALLS_ENTRY_POINTS = (2, 1), (2, 5)
SLOW_SECONDS = 20.0


def checks(asked: CheckOptions) -> Iterator[Check]:
    spec = importlib.util.find_spec("torch")
    if spec is None:
        yield fail("import", f"there is no torch for {sys.executable}", "pip install torch, or --python PATH")
        return
    begin = time.monotonic()
    try:
        import torch
    except Exception as error:  # noqa: BLE001 (a broken installation may raise anything)
        hint = "pip install --force-reinstall torch; if that is not the torch you mean, look into PYTHONPATH"
        yield fail("import", f"{said(error)} (in {spec.origin})", hint)
        return
    seconds = time.monotonic() - begin
    yield _version(str(torch.__version__))
    if seconds > SLOW_SECONDS:
        yield warn("import", f"takes {seconds:.0f} s from {spec.origin}", "put the environment on a local disk")
    else:
        yield good("import", f"takes {seconds:.1f} s from {os.path.dirname(spec.origin or '')}")  # noqa: PTH120
    yield good("build", _build(), alike="warn")
    yield _distributed()


def _version(version: str) -> Check:
    found = tuple(int(part) for part in version.split(".")[:2])
    listed = importlib.metadata.version("torch")
    if found < NEEDED:
        return fail("version", version, "pip install --upgrade torch: 2.1 is the least", alike="warn")
    if listed.partition("+")[0] != version.partition("+")[0]:
        hint = "look into PYTHONPATH: another torch than the installed one is imported"
        return warn("version", f"{version} is imported, {listed} is installed", hint, alike="warn")
    if found < CALLS_ENTRY_POINTS:
        hint = "a later torch calls DADT by itself; with this one it gets in by PYTHONPATH, which python -I ignores"
        return warn("version", version, hint, alike="warn")
    return good("version", version, alike="warn")


def _build() -> str:
    import torch

    platform = "CPU"
    if torch.version.cuda:
        platform = f"CUDA {torch.version.cuda}"
    elif getattr(torch.version, "hip", None):
        platform = f"ROCm {torch.version.hip}"
    return f"{platform}, C++11 ABI {'on' if torch._C._GLIBCXX_USE_CXX11_ABI else 'off'}"


def _distributed() -> Check:
    from torch import distributed

    if not distributed.is_available():
        hint = "install a torch that is built with USE_DISTRIBUTED=1: jobs over several hosts need it"
        return fail("distributed", "not built in", hint)
    there = {
        "gloo": distributed.is_gloo_available(),
        "nccl": distributed.is_nccl_available(),
        "mpi": distributed.is_mpi_available(),
        "ucc": distributed.is_ucc_available(),
    }
    names = ", ".join(name for name, value in there.items() if value) or "none"
    if not there["gloo"]:
        hint = "install a torch that is built with Gloo: jobs over several hosts need it"
        return fail("backends", names, hint)
    return good("backends", names, alike="warn")
