"""Which MPI library a rank must use: that of the mpirun that started it. With another one, each rank is alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from dadt.errors import ConfigError

CHOICE = "MPI4PY_LIBMPI"
"""By this mpi4py is told which library to load."""
DEBIANS, WANTED = "libmpich.so.12", "libmpi.so.12"
"""Debian's name of MPICH's library, and that by which mpi4py from PyPI asks for it."""
LIBRARIES = {
    "libmpi.so.40": ("orterun", "orted", "prterun", "prted", "prte"),
    WANTED: ("mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_proxy", "mpiexec"),
    DEBIANS: ("mpiexec.hydra", "hydra_pmi_proxy"),
}
"""By name, the programs that start ranks which use them: Open MPI's; MPICH's and Intel MPI's; Debian's MPICH's."""
FOLDERS = ("lib", "lib64", "lib/release", "lib/*-linux-gnu")
"""Where libraries are, beside the bin of such a program."""
INSTALL = "pip install 'dadt[mpi]', or apt-get install openmpi-bin and pip install mpi4py"
CHECK_SECONDS = 30.0


def of_mpirun() -> Path | None:
    """The library of the mpirun that started this process; None where that is not known."""
    return next((found for program in _ancestors() for found in beside(program)), None)


def choose() -> None:
    """In a rank, before mpi4py.MPI is imported: let it load the library of its mpirun."""
    if (library := of_mpirun()) is not None:
        os.environ.setdefault(CHOICE, str(library))


def variables(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """What makes a worker's mpi4py load the library of its mpirun, whatever else is installed.

    env: what the worker would get without. folder: this job's, where a link may be put.
    """
    library = Path(env[CHOICE]) if CHOICE in env else of_mpirun()
    if library is None:
        return {}
    chosen = {CHOICE: str(library)}
    if library.name == DEBIANS:
        # A folder with nothing else in it: that of all libraries would come before a Python's own.
        links = folder / "mpi"
        links.mkdir(exist_ok=True)
        link = links / WANTED
        if not link.is_symlink():
            try:
                link.symlink_to(library)
            except FileExistsError:
                pass  # another worker of this host was faster
        chosen["LD_LIBRARY_PATH"] = ":".join(filter(None, [str(links), env.get("LD_LIBRARY_PATH")]))
    return chosen


def loaded() -> str:
    """What the library that mpi4py loads here calls itself. Raises ConfigError where there is none."""
    tell = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    try:
        done = subprocess.run(
            [sys.executable, "-c", tell], capture_output=True, text=True, timeout=CHECK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"executor mpi: mpi4py could not be tried ({error}) -> {INSTALL}") from error
    if done.returncode:
        raise ConfigError(unusable(done.stderr))
    return done.stdout


def missing(env: Mapping[str, str], folder: Path) -> list[str]:
    """What a worker of this host would need of MPI in vain: a sentence, with the places and what to do.

    env, folder: as of `variables`.
    """
    load = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
    try:
        done = subprocess.run(
            [sys.executable, "-c", load],
            env={**env, **variables(env, folder), "DADT_INJECT": "none"},
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHECK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"mpi4py could not be tried ({error}) -> {INSTALL}"]
    return [unusable(done.stderr)] if done.returncode else []


def unusable(error: str) -> str:
    """Why mpi4py cannot be used, from the error with which it could not be imported."""
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
    """The libraries for the ranks of a program that starts ranks."""
    for name, programs in LIBRARIES.items():
        if program.name in programs:
            for folder in FOLDERS:
                yield from program.parent.parent.glob(f"{folder}/{name}")


def _ancestors() -> Iterator[Path]:
    """The programs of this process's parents, nearest first."""
    pid = os.getppid()
    while pid > 1:
        try:
            yield Path(f"/proc/{pid}/exe").resolve(strict=True)
        except OSError:
            pass  # another user's, as Slurm's daemon
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return  # it has ended
