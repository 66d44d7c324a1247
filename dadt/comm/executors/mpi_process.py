"""Initialises and finalizes MPI in this process."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import Any

from dadt.control import mpi_library
from dadt.errors import ConfigError


class MpiProcess:
    """MPI's state in this process: initialised at most once, and finalized when all communicators are closed and the
    interpreter is about to exit."""

    def __init__(self) -> None:
        self.serial: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        """Lock to use around each call if the MPI library allows one thread at a time; else a context that does
        nothing."""
        self._mpi: Any = None
        self._ours = False
        self._open = 0
        self._failed = False
        self._exiting = False
        self._pid = 0

    @property
    def takes_one_thread(self) -> bool:
        return not isinstance(self.serial, contextlib.nullcontext)

    @property
    def path(self) -> str:
        """Path of the loaded MPI library; empty if none is loaded."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            if Path(line).name.startswith(("libmpi.so", "libmpich.so")):
                return line[line.index("/") :]
        return ""

    @property
    def library(self) -> str:
        """Name and path of the loaded MPI library."""
        words = str(self._mpi.Get_library_version()).split("\n")[0].split(",")[0].replace("\t", " ").rstrip("\0")
        return f"{words}, {self.path}"

    def begin(self) -> Any:
        """Initialise MPI if necessary and return the module mpi4py.MPI. Raises ConfigError if there is no usable
        MPI."""
        if self._mpi is not None:
            return self._mpi
        # If the script imported mpi4py, mpi4py finalizes MPI at exit. Otherwise DADT finalizes MPI, but not after
        # failures: a failed rank would wait in MPI_Finalize for peers that wait for this rank.
        ours = "mpi4py.MPI" not in sys.modules
        mpi_library.choose()
        try:
            import mpi4py

            if ours:
                mpi4py.rc.finalize = False
            from mpi4py import MPI as mpi
        except (ImportError, RuntimeError) as error:
            raise ConfigError(mpi_library.unusable(str(error))) from error
        if not mpi.Is_initialized():
            mpi.Init_thread(mpi.THREAD_MULTIPLE)
        level = mpi.Query_thread()
        if level < mpi.THREAD_SERIALIZED:
            raise ConfigError(
                "executor mpi: the script has initialised MPI for its main thread only, and DADT uses it from another "
                "one -> initialise it with MPI.THREAD_MULTIPLE, as mpi4py does by itself"
            )
        if level < mpi.THREAD_MULTIPLE:
            self.serial = threading.Lock()
        self._mpi, self._ours, self._pid = mpi, ours, os.getpid()
        atexit.register(self._exit)
        return mpi

    def opened(self) -> None:
        """Count one more open communicator; MPI is finalized only without open ones."""
        self._open += 1

    def closed(self, failed: bool) -> None:
        """Count one communicator fewer. failed: whether the communicator was aborted; its ranks are then in unknown
        states, so MPI must not be finalized."""
        self._open -= 1
        self._failed |= failed
        if self._exiting:
            self._end()

    def _exit(self) -> None:
        """Finalize MPI when the interpreter exits, or later, when the last open communicator is closed."""
        self._exiting = True
        self._end()

    def _end(self) -> None:
        if self._ours and not self._open and not self._failed and os.getpid() == self._pid:
            self._ours = False
            self._mpi.Finalize()


process = MpiProcess()
