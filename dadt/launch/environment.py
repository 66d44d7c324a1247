"""The environment that a worker is born into."""

from __future__ import annotations

import importlib.metadata
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from dadt.config import Config
from dadt.launch.slot import Slot

SITE = Path(__file__).with_name("site")
"""Its sitecustomize.py hooks DADT into a torch that knows no entry points."""


def common(config: Config, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What all workers of a host share: the launcher's own environment, and the knobs."""
    result = {name: value for name, value in env.items() if not name.startswith("DADT_")}
    result.update(config.to_env())
    result["PYTHONUNBUFFERED"] = "1"
    if needs_sitecustomize(config, env):
        paths = [str(SITE), *filter(None, [env.get("PYTHONPATH")])]
        result["PYTHONPATH"] = ":".join(paths)
    return result


def own(slot: Slot, job: str, port: int | None, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What differs between workers. port: of torch's rendezvous; None leaves torchrun's variables out."""
    result = slot.world(job).to_env()
    if port is not None:
        result.update(
            RANK=str(slot.rank),
            LOCAL_RANK=str(slot.local_rank),
            WORLD_SIZE=str(slot.world_size),
            LOCAL_WORLD_SIZE=str(slot.local_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    if "OMP_NUM_THREADS" not in env:
        result["OMP_NUM_THREADS"] = str(slot.threads)
    if slot.gpu is not None:
        result["CUDA_VISIBLE_DEVICES"] = slot.gpu
    return result


def needs_sitecustomize(config: Config, env: Mapping[str, str] = os.environ) -> bool:
    """Whether torch will not call DADT's entry point by itself: before 2.5, or told not to."""
    if config.inject in ("none", "entrypoint"):
        return False
    return (
        config.inject == "sitecustomize"
        or env.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1"
        or _torch_version() < (2, 5)
    )


def isolating_flags(arguments: Sequence[str]) -> list[str]:
    """Python's own flags among the arguments that make it ignore PYTHON* variables or site packages."""
    found = []
    for argument in arguments:
        if not argument.startswith("-") or argument in ("-", "-m", "-c"):
            break
        if re.fullmatch(r"-[A-Za-z]*[IES][A-Za-z]*", argument):
            found.append(argument)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _torch_version() -> tuple[int, int]:
    """Of the installed torch, without importing it; very new where there is none to look at."""
    try:
        major, minor, *_ = importlib.metadata.version("torch").split(".")
    except importlib.metadata.PackageNotFoundError:
        return 99, 0
    return int(major), int(minor)
