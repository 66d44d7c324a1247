"""Checks NVIDIA GPUs, their driver, whether the installed torch can use them, and NCCL."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path

from dadt.control import machine
from dadt_cli.check_env import gpu_links
from dadt_cli.check_env.check import Check, CheckOptions, ask, fail, good, said, warn

MODES = ("index", "persistence_mode", "mig.mode.current")
QUERY = ("index", "name", "driver_version", "memory.total", "memory.used", "compute_mode")
SMI_SECONDS = 20.0
BUSY = 0.1
"""Share of a GPU's memory in use above which the GPU counts as busy."""
NODES = Path("/dev/nvidiactl")
INSTALL = "https://pytorch.org/get-started/locally names the pip line for it"
UNPEERED, PEERED_DRIVER = "GeForce RTX 40", (550, 40, 7)
"""Name of GPUs for which older drivers wrongly report that they can access each other's memory, and the first driver
version that reports correctly."""
ARCH = re.compile(r"(sm|compute)_(\d+?)(\d)[a-z]?")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as nvidia-smi sees it; memory in MiB."""

    index: str
    name: str
    driver: str
    total: float
    used: float
    mode: str


def checks(asked: CheckOptions) -> Iterator[Check]:
    gpus = _gpus()
    if isinstance(gpus, Check):
        yield gpus
        return
    built_for = _built_for()
    if not gpus:
        yield good("GPUs", "none")
        if built_for:
            yield good("torch", f"is built for CUDA {built_for}, and trains on the CPU here")
        return
    yield good("driver", gpus[0].driver, alike="warn")
    yield good("GPUs", _counted([gpu.name for gpu in gpus]), alike="warn")
    yield _visible(len(gpus))
    yield from _state(gpus)
    yield from _modes()
    if len(gpus) > 1:
        yield gpu_links.checked()
        yield from _without_peers(gpus)
    if built_for is None:
        return  # torch is not installed, which the checks of the subject `torch` report
    if not built_for:
        yield fail("torch", "is built without CUDA, and leaves these GPUs alone", f"install one with CUDA: {INSTALL}")
        return
    yield from _torch(built_for)


def _gpus() -> list[Gpu] | Check:
    """Return the GPUs that nvidia-smi lists, which is part of the driver and does not need torch: an empty list without
    a driver, or a Check with the reason if nvidia-smi fails."""
    if shutil.which("nvidia-smi") is None:
        if NODES.exists():
            hint = "add it to PATH; for a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            return warn("GPUs", "a driver is loaded, but there is no nvidia-smi", hint)
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    hint = "`nvidia-smi` must work first: load the driver, or restart after its update"
    text, wrong = ask(command, SMI_SECONDS)
    if "No devices were found" in text:
        return []
    if wrong:
        return fail("GPUs", f"nvidia-smi{wrong}", hint)
    return [_gpu(line) for line in text.splitlines() if line.strip()]


def _gpu(line: str) -> Gpu:
    index, name, driver, total, used, mode = (part.strip() for part in line.split(",", len(QUERY) - 1))
    return Gpu(index, name, driver, _number(total), _number(used), mode)


def _number(text: str) -> float:
    """Parse a number; 0 if the driver reports none, as for some MIG instances and virtual GPUs."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _visible(installed: int) -> Check:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return good("visible", f"all {installed}")
    seen = machine.gpus()
    if not seen:
        return warn(
            "visible", f"none: CUDA_VISIBLE_DEVICES={chosen!r}", "unset CUDA_VISIBLE_DEVICES, unless on purpose"
        )
    wrong = [name for name in seen if name.isdigit() and int(name) >= installed]
    if wrong or len(seen) < len(chosen.split(",")):
        hint = f"CUDA ignores all from the first wrong one on: there are 0 to {installed - 1}"
        return warn("visible", f"CUDA_VISIBLE_DEVICES={chosen}", hint)
    return good("visible", f"CUDA_VISIBLE_DEVICES={chosen}")


def _state(gpus: Sequence[Gpu]) -> Iterator[Check]:
    exclusive = [gpu.index for gpu in gpus if gpu.mode.startswith("Exclusive")]
    if exclusive:
        hint = "nvidia-smi -c DEFAULT, or one worker for each GPU and nothing beside it"
        yield warn("compute mode", f"exclusive on GPU {', '.join(exclusive)}", hint)
    if forbidden := [gpu.index for gpu in gpus if gpu.mode == "Prohibited"]:
        yield fail("compute mode", f"prohibited on GPU {', '.join(forbidden)}", "nvidia-smi -c DEFAULT")
    busy = [gpu for gpu in gpus if gpu.total and gpu.used > BUSY * gpu.total]
    for gpu in busy:
        value = f"{gpu.used:,.0f} of {gpu.total:,.0f} MiB in use{_users(gpu.index)}"
        yield warn(f"memory of GPU {gpu.index}", value, "end what uses it; `dadt ps` lists jobs of yours")
    if not busy:
        yield good("memory", ", ".join(dict.fromkeys(f"{gpu.total:,.0f} MiB" for gpu in gpus)) + " each, free")


def _modes() -> Iterator[Check]:
    """Check MIG and persistence mode; yields nothing if an old driver does not report them."""
    command = ["nvidia-smi", f"--query-gpu={','.join(MODES)}", "--format=csv,noheader"]
    text, wrong = ask(command, SMI_SECONDS)
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == len(MODES)]
    if wrong or not rows:
        return
    if divided := [index for index, _, mig in rows if mig == "Enabled"]:
        hint = "one instance for each worker, and --executor shm: NCCL does not join instances of one GPU"
        yield warn("MIG", f"enabled on GPU {', '.join(divided)}", hint)
    if asleep := [index for index, persistence, _ in rows if persistence == "Disabled"]:
        hint = "nvidia-smi -pm 1: otherwise the first worker waits seconds for the driver"
        yield good("persistence", f"disabled on GPU {', '.join(asleep)}", hint)
    else:
        yield good("persistence", "enabled")


def _without_peers(gpus: Sequence[Gpu]) -> Iterator[Check]:
    names = [gpu.name for gpu in gpus if UNPEERED in gpu.name]
    driver = tuple(int(part) for part in gpus[0].driver.split(".") if part.isdigit())
    if names and driver < PEERED_DRIVER and os.environ.get("NCCL_P2P_DISABLE") != "1":
        hint = "driver 550.40.07 or later, or NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1: NCCL hangs or fails otherwise"
        yield warn("peers", f"{names[0]} with driver {gpus[0].driver} claims ways that it does not have", hint)


def _users(index: str) -> str:
    """Return the names of the processes that use the GPU's memory as text. A container may hide these processes."""
    command = ["nvidia-smi", "-i", index, "--query-compute-apps=pid", "--format=csv,noheader"]
    pids = [line.strip() for line in ask(command, SMI_SECONDS)[0].splitlines() if line.strip().isdigit()]
    return f" by processes {', '.join(pids)}" if pids else ""


def _built_for() -> str | None:
    """Return the CUDA version that the installed torch was built for, without importing torch: empty if it was built
    without CUDA, None if torch is not installed."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        return None
    return runpy.run_path(str(file)).get("cuda") or ""


def _torch(built_for: str) -> Iterator[Check]:
    try:
        import torch
    except Exception:  # noqa: BLE001 (the checks of the subject `torch` report it)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        reason = _why(str(caught[0].message) if caught else "")
        if not machine.gpus():
            return  # CUDA_VISIBLE_DEVICES hides all GPUs, which another check reports
        hint = f"update the driver, or install a torch for an older CUDA: {INSTALL}"
        yield fail("torch", f"is built for CUDA {built_for}, and sees no GPU{reason}", hint)
        return
    yield good("torch", f"built for CUDA {built_for}, sees {torch.cuda.device_count()}", alike="warn")
    yield from _each()
    yield from _nccl()


def _why(warning: str) -> str:
    """Return torch's reason for seeing no GPU: its warning, or the error that initialization raises."""
    import torch

    if not warning:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 (an error of any type is shown)
            warning = str(error)
    return f" ({warning.strip().splitlines()[0][:200]})" if warning.strip() else ""


def _each() -> Iterator[Check]:
    """Check for each GPU whether it runs a kernel of the installed torch."""
    import torch

    built = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        name = f"kernel on GPU {index}"
        if built and not _fits(built, major, minor):
            value = f"compute capability {major}.{minor}, and torch is built for {', '.join(built)}"
            yield fail(name, value, f"install a torch that is built for it: {INSTALL}")
            continue
        try:
            total = float((torch.ones(1024, device=f"cuda:{index}") * 2).sum())
        except Exception as error:  # noqa: BLE001 (an error of any type is shown)
            yield fail(name, said(error), "another process may hold it, or it needs a reset: see nvidia-smi and dmesg")
            continue
        if total != 2048.0:
            yield fail(name, f"computes wrong: {total} in place of 2048", "do not train on it")
        else:
            yield good(name, f"computes, compute capability {major}.{minor}")


def _fits(built: Sequence[str], major: int, minor: int) -> bool:
    """Return whether code built for one of these architectures runs on a GPU of this compute capability: binary code
    needs the same major and at most this minor version, PTX (compute_) runs on all later versions."""
    for arch in built:
        if (found := ARCH.fullmatch(arch)) is None:
            continue
        kind, has = found[1], (int(found[2]), int(found[3]))
        if has <= (major, minor) and (kind == "compute" or has[0] == major):
            return True
    return False


def _nccl() -> Iterator[Check]:
    import torch
    from torch import distributed

    if not (distributed.is_available() and distributed.is_nccl_available()):
        yield warn("NCCL", "is not built into this torch", f"install one with it, or --executor gloo: {INSTALL}")
        return
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    others = [
        path
        for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":")
        if folder
        for path in Path(folder).glob("libnccl.so*")
    ]
    if others:
        hint = "take the folder out of LD_LIBRARY_PATH: all hosts must load the same NCCL"
        yield warn("NCCL", f"{version}, and another one is {others[0]}", hint, alike="fail")
    else:
        yield good("NCCL", version, alike="fail")
    count = torch.cuda.device_count()
    apart = [pair for pair in combinations(range(count), 2) if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        listed = ", ".join(f"{one}-{other}" for one, other in apart[:8])
        hint = (
            "NCCL goes through the host's memory there; if it hangs, NCCL_P2P_DISABLE=1. `nvidia-smi topo -m` says why"
        )
        yield warn("peer access", f"none between GPUs {listed}", hint)
    elif count > 1:
        yield good("peer access", "between all GPUs")


def _counted(names: Sequence[str]) -> str:
    """Join names with their counts as text, such as "4 x NVIDIA H100, NVIDIA A100"."""
    counts = {name: names.count(name) for name in names}
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())
