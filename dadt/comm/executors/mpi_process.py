"""MPI in this process: its begin and its end."""

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
    """MPI in this process: begun at most once, and ended once nothing is open and the interpreter is about to end."""

    def __init__(self) -> None:
        self.serial: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        """A lock held around each call if the library takes one thread at a time; else a context that does nothing."""
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
        """The path of the loaded library; empty if there is none."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            if Path(line).name.startswith(("libmpi.so", "libmpich.so")):
                return line[line.index("/") :]
        return ""

    @property
    def library(self) -> str:
        """The loaded library's name and path."""
        words = str(self._mpi.Get_library_version()).split("\n")[0].split(",")[0].replace("\t", " ").rstrip("\0")
        return f"{words}, {self.path}"

    def begin(self) -> Any:
        """mpi4py.MPI, initialised. Raises ConfigError where there is none that is of use."""
        if self._mpi is not None:
            return self._mpi
        # The script's own import leaves the end to mpi4py. Ours does not, as a rank that has failed would then wait
        # in MPI_Finalize for peers that wait for it.
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
        """Count one more communicator."""
        self._open += 1

    def closed(self, failed: bool) -> None:
        """Count one communicator less. failed: nobody knows what its ranks are doing."""
        self._open -= 1
        self._failed |= failed
        if self._exiting:
            self._end()

    def _exit(self) -> None:
        """Finalize MPI last: whatever ends before may still close communicators."""
        self._exiting = True
        self._end()

    def _end(self) -> None:
        if self._ours and not self._open and not self._failed and os.getpid() == self._pid:
            self._ours = False
            self._mpi.Finalize()


process = MpiProcess()
