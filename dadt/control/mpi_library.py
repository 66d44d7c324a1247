"""Finds the MPI library of the mpirun that started a rank. With any other MPI library, each rank would see a world with
itself as the only rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dadt.control.proc import ancestors
from dadt.errors import ConfigError

CHOICE = "MPI4PY_LIBMPI"
"""Environment variable that names the MPI library for mpi4py to load."""
DEBIANS, WANTED = "libmpich.so.12", "libmpi.so.12"
"""File name of MPICH's library on Debian, and the name that mpi4py from PyPI looks for."""
LIBRARIES = {
    "libmpi.so.40": ("orterun", "orted", "prterun", "prted", "prte"),
    WANTED: ("mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_proxy", "mpiexec"),
    DEBIANS: ("mpiexec.hydra", "hydra_pmi_proxy"),
}
"""Maps each MPI library's file name to the programs that start ranks of it. The entries are Open MPI, then MPICH or
Intel MPI, then Debian's MPICH."""
FOLDERS = ("lib", "lib64", "lib/release", "lib/*-linux-gnu")
"""Folders that may contain the MPI library, relative to the parent of the launching program's bin folder."""
INSTALL = "pip install 'dadt[mpi]', or apt-get install openmpi-bin and pip install mpi4py"
CHECK_SECONDS = 30.0


def of_mpirun() -> Path | None:
    """Return the library of the mpirun that started this process; None if unknown."""
    return next((found for program in _ancestors() for found in beside(program)), None)


def choose() -> None:
    """Make mpi4py load the library of this rank's mpirun. Must be called before mpi4py.MPI is imported."""
    if (library := of_mpirun()) is not None:
        os.environ.setdefault(CHOICE, str(library))


def variables(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return environment variables that make a worker's mpi4py load the library of the worker's mpirun, even if other
    MPI libraries are installed.

    env: the worker's environment without these variables. folder: the job's folder, in which a symlink may be created.
    """
    library = Path(env[CHOICE]) if CHOICE in env else of_mpirun()
    if library is None:
        return {}
    chosen = {CHOICE: str(library)}
    if library.name == DEBIANS:
        # The symlink has a folder of its own: adding the system's library folder to the search path would hide
        # libraries of a Python installation.
        links = folder / "mpi"
        links.mkdir(exist_ok=True)
        link = links / WANTED
        if not link.is_symlink():
            try:
                link.symlink_to(library)
            except FileExistsError:
                pass  # another worker of this host has created the link
        chosen["LD_LIBRARY_PATH"] = ":".join(filter(None, [str(links), env.get("LD_LIBRARY_PATH")]))
    return chosen


def loaded() -> str:
    """Return the version string of the MPI library that mpi4py loads here. Raises ConfigError if there is none."""
    return _try("print(MPI.Get_library_version())", os.environ, None)


def missing(env: Mapping[str, str], folder: Path) -> list[str]:
    """Return a list with one text that says why a worker of this host cannot use MPI, which places were searched, and
    how to solve the problem; an empty list if the worker can use MPI.

    env: the worker's environment. folder: the job's folder.
    """
    try:
        _try("", {**env, **variables(env, folder), "DADT_INJECT": "none"}, "/")
    except ConfigError as error:
        return [str(error)]
    return []


def _try(code: str, env: Mapping[str, str], cwd: str | None) -> str:
    """Have mpi4py load an MPI library in another process, which then runs `code`, and return what the process prints.
    cwd: its working folder; None: this process's. Raises ConfigError."""
    command = [sys.executable, "-c", f"import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; {code}"]
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
    try:
        done = subprocess.run(command, env=env, cwd=cwd, timeout=CHECK_SECONDS, check=False, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"executor mpi: mpi4py could not be tried ({error}) -> {INSTALL}") from error
    if done.returncode:
        raise ConfigError(unusable(done.stderr))
    return str(done.stdout)


def unusable(error: str) -> str:
    """Return a sentence that says why mpi4py cannot be used and how to solve this. error: standard error of its failed
    import."""
    if find_spec("mpi4py") is None:
        places = ", ".join(path for path in sys.path if path.endswith("-packages"))
        return f"executor mpi: there is no mpi4py for {sys.executable} (looked in {places}) -> {INSTALL}"
    library = of_mpirun()
    reason = (error.strip().splitlines() or ["it says nothing"])[-1]
    remedy = INSTALL
    if library is not None and library.name == DEBIANS:
        remedy = f"start by dadt run, or make a folder with a link, ln -s {library} {WANTED}, for LD_LIBRARY_PATH"
    first = f"{CHOICE}={os.environ[CHOICE]}" if CHOICE in os.environ else f"{library or 'beside an mpirun'}"
    paths = os.environ.get("LD_LIBRARY_PATH") or "(LD_LIBRARY_PATH is not set)"
    places = f"{first}, {sys.prefix}/lib, {paths}, the system's folders"
    return f"executor mpi: mpi4py finds no MPI library ({reason}; looked in {places}) -> {remedy}"


def beside(program: Path) -> Iterator[Path]:
    """Yield the MPI libraries in the same installation as `program`, which starts MPI ranks."""
    for name, programs in LIBRARIES.items():
        if program.name in programs:
            for folder in FOLDERS:
                yield from program.parent.parent.glob(f"{folder}/{name}")


def _ancestors() -> Iterator[Path]:
    """Yield the programs of this process's ancestors, nearest first."""
    for pid in ancestors():
        with suppress(OSError):  # the program of another user's process, such as Slurm's daemon, cannot be read
            yield Path(f"/proc/{pid}/exe").resolve(strict=True)
