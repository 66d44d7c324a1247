"""The MPIs that are installed here, and what is seen of their jobs from outside."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

MPIRUNS = {"mpirun.openmpi": "openmpi-bin", "mpirun.mpich": "mpich"}
"""As Debian names them, and the packages in which they are."""
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MPICH_LIBRARY = "/usr/lib/x86_64-linux-gnu/libmpich.so.12"


def installed(name: str) -> str:
    """Skips where it is not, and fails where it must be."""
    if shutil.which(name) is None and name in MPIRUNS:
        reason = f"there is no {name} (apt-get install {MPIRUNS[name]})"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return name


def by_mpirun(name: str, ranks: int) -> list[str]:
    """What runs the command that follows as so many ranks of this machine."""
    return [installed(name), *(["--oversubscribe"] if "openmpi" in name else []), "-np", str(ranks)]


def shims(job: str) -> list[int]:
    """The processes between mpirun and the job's workers, and mpirun with its daemons: by the note they carry."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue  # it ended while we looked
        if b'DADT_SHIM={"job": "' + job.encode() in environment:
            found.append(int(entry.name))
    return found
