"""Checks every MPI installation and mpi4py, which only --executor mpi and --launcher mpi need."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Generator, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from dadt.control import mpi_library
from dadt.errors import ConfigError
from dadt.launch.launchers import mpi
from dadt_cli.check_env import training
from dadt_cli.check_env.check import Check, CheckOptions, ask, good, refused, warn

PATTERNS = ("mpirun", "mpirun.*", "mpiexec", "mpiexec.*")
VERSION = re.compile(r"\d+\.\d+[\w.]*")
ASK_CUDA = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).MPIX_Query_cuda_support())"
ASK_SECONDS = 10.0
AWARE = {"1": "CUDA-aware", "0": "not CUDA-aware"}
UNUSED = "none; only --executor mpi and --launcher mpi need one"


def checks(asked: CheckOptions) -> Iterator[Check]:
    chosen = mpi.located(asked.mpirun)
    found = _programs(chosen)
    for path in found:
        yield _implementation(path, chosen is not None and path == Path(chosen).resolve())
    usable = yield from _chosen(asked.mpirun, chosen, bool(found))
    if find_spec("mpi4py") is None:
        yield good("mpi4py", UNUSED, "" if chosen is None else f"for --executor mpi: {mpi_library.INSTALL}")
    elif usable:
        yield from _mpi4py(asked, Path(chosen or "").resolve())
    else:
        yield good("mpi4py", version("mpi4py"), "it needs an MPI of its own: the lines above say which is found")


def _programs(chosen: str | None) -> list[Path]:
    """Find all programs that start MPI ranks, in PATH and beside Python, each once."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), str(Path(sys.executable).parent)]
    found = [Path(chosen)] if chosen else []
    for folder in filter(None, folders):
        for pattern in PATTERNS:
            found += sorted(path for path in Path(folder).glob(pattern) if os.access(path, os.X_OK) and path.is_file())
    return list(dict.fromkeys(path.resolve() for path in found))


def _implementation(path: Path, is_chosen: bool) -> Check:
    try:
        _, flavour = mpi.find(str(path))
    except ConfigError as error:
        return warn(path.name, error, "not taken by dadt run unless --mpirun names it")
    number = VERSION.search(mpi.said_version(str(path)))
    libraries = list(dict.fromkeys(mpi_library.beside(path)))
    aware = _cuda(libraries[0]) if libraries else "its library is not beside it"
    value = f"{flavour} {number[0] if number else ''}, {aware}, {path}"
    return good(path.name, value + (", taken by dadt run" if is_chosen else ""), alike="warn" if is_chosen else "")


def _chosen(name: str, chosen: str | None, others: bool) -> Generator[Check, None, bool]:
    """Check the mpirun that `dadt run` would use. Yields checks that describe what is wrong with this mpirun, and
    returns whether an mpirun was found."""
    if chosen is not None:
        return True
    if name != "mpirun":
        yield refused("mpirun", f"there is no {name}", "give the right path by --mpirun")
    elif find_spec("mpi4py") is not None:
        hint = f"for --executor mpi: {mpi_library.INSTALL}" + (
            "; or name one of those above by --mpirun" if others else ""
        )
        yield warn("mpirun", "none in PATH, though mpi4py is installed", hint)
    else:
        yield good("mpirun", UNUSED)
    return False


def _mpi4py(asked: CheckOptions, mpirun: Path) -> Iterator[Check]:
    """Check mpi4py with the MPI library that `dadt run` would let it load for this mpirun."""
    libraries = list(mpi_library.beside(mpirun))
    with tempfile.TemporaryDirectory() as folder:
        if libraries:
            os.environ.setdefault(mpi_library.CHOICE, str(libraries[0]))
        os.environ.update(mpi_library.variables(os.environ, Path(folder)))
        try:
            loaded = mpi_library.loaded().strip().splitlines()[0]
        except ConfigError as error:
            yield refused("mpi4py", str(error), mpi_library.INSTALL)
            return
    value = f"{version('mpi4py')}, loads {loaded.partition(', package')[0]}"
    flavour = mpi.find(str(mpirun))[1]
    if flavour in mpi.FLAVOURS and flavour != "Slurm" and not any(mark in loaded for mark in mpi.FLAVOURS[flavour]):
        hint = f"unset {mpi_library.CHOICE}, or let it name the library of {mpirun}: with another, each rank is alone"
        yield warn("mpi4py", f"{value}, but {mpirun} is {flavour}", hint)
        return
    yield good("mpi4py", value, alike="warn")
    if asked.full:
        yield training.train(
            "two ranks", asked, executor="mpi", launcher="mpi", mpirun=asked.mpirun, gpu_visibility="all"
        )


def _cuda(path: Path) -> str:
    """Return a text that says whether an MPI library is CUDA-aware. A separate process loads the library, since one
    process cannot load two MPI libraries."""
    out, _ = ask([sys.executable, "-c", ASK_CUDA, str(path)], ASK_SECONDS)
    return AWARE.get(out.strip(), "does not tell whether it is CUDA-aware")
