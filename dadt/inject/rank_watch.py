"""Detects whether the script reads its rank. If so, DADT leaves it to the script to divide data and to decide what each
rank writes."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dadt.inject.after_import import after_import
from dadt.inject.failure import is_users
from dadt.inject.patch import replaces
from dadt.train.runtime import Runtime

VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "DADT_RANK", "DADT_LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "PMI_RANK", "PMIX_RANK"}
    | {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "ROLE_RANK"}
)
HIDDEN = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"}
    | {"ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    | {"TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"}
)
HIDDEN_FROM = frozenset({"accelerate", "transformers", "timm", "fastai", "fastcore", "ultralytics"})
"""Libraries that take variables such as RANK as a request to train on GPUs, which fails on machines without GPUs."""
HIDDEN_FROM_ALONE = frozenset({"webdataset"})
"""Libraries that divide data among the ranks, or refuse to read it, if they find variables such as RANK. The variables
are hidden from these libraries, unless the script has a process group and so is written for several ranks."""
LITERAL = re.compile(rf"""(["'])({"|".join(VARIABLES)})\1""")
ENVIRONMENT = ("os", "collections.abc")
OURS = ("torch", "dadt")


def install(runtime: Runtime) -> None:
    """Set `knows_rank` when the script's own code reads its rank from the environment, or any code except torch's asks
    a process group for its rank.

    A library that reads the environment may only look for a launcher, so it does not count. On machines without GPUs,
    the variables are hidden from the libraries in HIDDEN_FROM, so that each rank trains as a single process. They are
    not hidden on an island, whose ranks are to train together. They are also hidden from the libraries in
    HIDDEN_FROM_ALONE, as described there.
    """
    runtime.script.knows_rank |= any(_names_a_variable(module) for module in list(sys.modules.values()))
    _watch_environment(runtime)
    if dist.is_available():
        for name in ("get_rank", "get_world_size"):
            _watch_asking(name, runtime)
        _watch_making(runtime)
        after_import("torch.distributed.checkpoint.filesystem", partial(_watch_checkpoints, runtime))


def _names_a_variable(module: Any) -> bool:
    """Return whether the module belongs to the script and its source contains the name of a rank variable, so that it
    may have read its rank before it imported torch."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py") or not is_users(file):
        return False
    try:
        return LITERAL.search(Path(file).read_text(errors="replace")) is not None
    except OSError:
        return False


def _watch_environment(runtime: Runtime) -> None:
    kind = type(os.environ)
    original, walk = kind.__getitem__, kind.__iter__
    wanted = torch.cuda.is_available() or runtime.ranks.world.island_size
    hidden_from = frozenset() if wanted else HIDDEN_FROM
    given = {name: os.environ[name] for name in HIDDEN if name in os.environ}

    def hides(asker: FrameType, name: Any) -> bool:
        if name not in given or original(os.environ, name) != given[name]:
            return False
        package = _package(asker)
        return package in hidden_from or (package in HIDDEN_FROM_ALONE and not _has_group())

    def look_up(environ: Any, name: Any) -> Any:
        value = original(environ, name)
        if name in given or name in VARIABLES:
            asker = _asker(sys._getframe(1))
            if hides(asker, name):
                raise KeyError(name)
            runtime.script.knows_rank |= name in VARIABLES and is_users(asker.f_code.co_filename)
        return value

    def iterate(environ: Any) -> Iterator[Any]:
        asker = _asker(sys._getframe(1))
        return iter([name for name in walk(environ) if not hides(asker, name)])

    kind.__getitem__ = look_up  # type: ignore[method-assign]
    kind.__iter__ = iterate  # type: ignore[method-assign]


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _asker(frame: FrameType) -> FrameType:
    """Return the frame that reads the environment, which is the nearest caller outside the standard library's functions
    for that."""
    while frame.f_back is not None and frame.f_globals.get("__name__") in ENVIRONMENT:
        frame = frame.f_back
    return frame


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _watch_asking(name: str, runtime: Runtime) -> None:
    @replaces(name, dist, distributed_c10d)
    def asked(*args: Any, **kwargs: Any) -> Any:
        if not runtime.script.knows_rank:
            runtime.script.knows_rank = _package(sys._getframe(1)) not in OURS
        return asked.__wrapped__(*args, **kwargs)


def _watch_making(runtime: Runtime) -> None:
    signature = inspect.signature(dist.init_process_group)

    @replaces("init_process_group", dist, distributed_c10d)
    def made(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments.get("rank", -1)
        runtime.script.knows_rank |= given is not None and given >= 0  # a script that passes its rank knows it
        made.__wrapped__(*args, **kwargs)


def _watch_checkpoints(runtime: Runtime, module: ModuleType) -> None:
    """Patch the writer of torch.distributed's checkpoints, which have a file for each rank: a script that creates one
    knows its rank."""

    @replaces("__init__", module.FileSystemWriter)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        runtime.script.knows_rank = True
        made.__wrapped__(self, *args, **kwargs)
