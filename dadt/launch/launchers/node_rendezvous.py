"""The place where the nodes of a job that is started by hand find each other: a port of node 0, or a file that all
nodes can read."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from pathlib import Path

from dadt.config import Config
from dadt.control.connection import Reach, Refused, Unreached, dial
from dadt.control.shared_secret import MAKE_SECRET, shared_key
from dadt.errors import ConfigError, LaunchError

ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[\w.-]+)):(?P<port>\d+)")
FILE = "file://"
FILE_LIMIT = 1 << 16
ASK_SECONDS = 2.0
"""Seconds to wait for the answer of another launcher, which may be using the same file."""


class PortRendezvous:
    def __init__(self, key: bytes, host: str, port: int, silence: float) -> None:
        self.port = port
        self.key = key
        self._reach = Reach(addresses=[host], port=port, key=self.key, silence=silence)

    def find(self) -> Reach:
        return self._reach

    def open(self, reach: Reach) -> None:
        pass  # nothing to do, as the user passes node 0's address to all nodes

    def close(self) -> None:
        pass


class FileRendezvous:
    """A file to which node 0 writes its address and a key for this job, and which only this user can read."""

    def __init__(self, path: Path) -> None:
        self.port = 0
        self.key = secrets.token_bytes(32)
        self._path = path
        self._name = f"--rendezvous {FILE}{path}"

    def find(self) -> Reach:
        """Return where node 0 listens, as the file says. Raises Unreached while the file does not exist, and
        LaunchError if it cannot be read or another user may have written it."""
        try:
            self._check_folder()
            # A symlink could lead to a file that another user chose, and opening a pipe would block until the pipe has
            # a writer.
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                self._check_file(os.fstat(descriptor))
                data = file.read(FILE_LIMIT + 1)
        except FileNotFoundError as error:
            raise Unreached(f"there is no {self._path}") from error
        except OSError as error:
            why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise LaunchError(f"{self._name}: cannot be read ({why})") from error
        try:
            if len(data) > FILE_LIMIT:
                raise ValueError("too long")
            return Reach.from_text(data.decode())
        except (ValueError, RecursionError) as error:
            raise LaunchError(f"{self._name}: was not written by dadt; give another file") from error

    def open(self, reach: Reach) -> None:
        """Write the address of node 0 to the file. Raises LaunchError if that is not possible, or if another job uses
        the file."""
        if self._path.parent.is_dir():
            self._check_folder()
        self._refuse_used()
        # The new file replaces the old one atomically, as other nodes may read the file at any time.
        fresh = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")
        try:
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(reach.to_text())
                file.flush()
                os.fsync(descriptor)
            fresh.replace(self._path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise LaunchError(f"{self._name}: cannot be written ({error.strerror})") from error

    def close(self) -> None:
        """Remove the file with the address of node 0, unless another job has replaced it."""
        try:
            if self.find().key == self.key:
                self._path.unlink(missing_ok=True)
        except LaunchError:
            pass  # the file was removed or replaced meanwhile

    def _check_folder(self) -> None:
        """Raise LaunchError if every user may replace files in the folder, since another user could then have written
        the file."""
        mode = self._path.parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            folder = self._path.parent
            raise LaunchError(f"{self._name}: everyone may replace files in {folder}; chmod o-w it, or give another")

    def _check_file(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise LaunchError(f"{self._name}: is not a file; give another name")
        if found.st_uid != os.getuid():
            raise LaunchError(f"{self._name}: belongs to another user; give another file")
        if mode := found.st_mode & 0o077:
            may = "read" if mode & 0o044 else "change"
            raise LaunchError(f"{self._name}: others may {may} it, and it holds the job's key; remove it")

    def _refuse_used(self) -> None:
        """Raise LaunchError if a launcher answers at the address in the file. If none answers, a killed launcher has
        left the file behind."""
        if not os.path.lexists(self._path):
            return
        try:
            dial(self.find, {}, time.monotonic() + ASK_SECONDS)
        except Refused as error:
            raise LaunchError(f"{self._name}: another job meets there now; give another file") from error
        except Unreached:
            return


def rendezvous_of(config: Config) -> PortRendezvous | FileRendezvous:
    """Return the rendezvous that the flag --rendezvous names. Raises ConfigError."""
    text = config.rendezvous
    if text.startswith(FILE):
        path = Path(text.removeprefix(FILE))
        if not path.is_absolute() or path.is_dir():
            raise ConfigError(f"--rendezvous {text}: give the absolute path of a file, as file:///shared/meet")
        return FileRendezvous(path)
    found = ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise ConfigError(f"--rendezvous {text}: give host:port of node 0, as host1:29400, or file:///shared/meet")
    # Without a secret, a stranger could join at the port, or pretend to be node 0 and run commands here.
    if not (key := shared_key(f"--rendezvous {text}")):
        raise ConfigError(f"--rendezvous {text}: a port needs a secret: {MAKE_SECRET}")
    return PortRendezvous(key, found["six"] or found["name"], int(found["port"]), config.orphan_timeout)
