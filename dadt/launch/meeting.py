"""Where the nodes of a job meet that is started by hand on each: at a port of node 0, or in a file that all see."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from pathlib import Path

from dadt.config import Config
from dadt.errors import ConfigError, LaunchError
from dadt.launch.listen import Reach, Refused, Unreached, dial

SECRET = "DADT_SECRET"
"""What all nodes know that meet at a port. Without it, whoever reaches the port may join."""
ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[\w.-]+)):(?P<port>\d+)")
FILE = "file://"
ASK_SECONDS = 2.0
"""How long a launcher that may be using the same file has to answer."""


class PortMeeting:
    def __init__(self, host: str, port: int, silence: float) -> None:
        self.port = port
        self.key = hashlib.sha256(os.environ.get(SECRET, "").encode()).digest()
        self._reach = Reach(addresses=[host], port=port, key=self.key, silence=silence)

    def find(self) -> Reach:
        return self._reach

    def open(self, reach: Reach) -> None:
        pass  # everyone knows it

    def close(self) -> None:
        pass


class FileMeeting:
    """Node 0 writes where it is, and a key for this job, into a file that only this user can read."""

    def __init__(self, path: Path) -> None:
        self.port = 0
        self.key = secrets.token_bytes(32)
        self._path = path
        self._name = f"--rendezvous {FILE}{path}"

    def find(self) -> Reach:
        """What node 0 wrote. Raises Unreached while there is nothing, LaunchError if it is not from node 0."""
        try:
            with self._path.open() as file:
                owner, text = os.fstat(file.fileno()).st_uid, file.read()
        except FileNotFoundError as error:
            raise Unreached(f"there is no {self._path}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(f"{self._name}: cannot be read ({getattr(error, 'strerror', error)})") from error
        if owner != os.getuid():
            raise LaunchError(f"{self._name}: belongs to another user; give another file")
        try:
            return Reach.from_text(text)
        except ValueError as error:
            raise LaunchError(f"{self._name}: was not written by dadt; give another file") from error

    def open(self, reach: Reach) -> None:
        """Raises LaunchError where the file cannot be written, or another job meets there."""
        self._refuse_used()
        # All of it or nothing, as others may read it at any time.
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
        """Remove the file, if it is still ours."""
        try:
            if self.find().key == self.key:
                self._path.unlink(missing_ok=True)
        except LaunchError:
            pass  # removed or replaced by another

    def _refuse_used(self) -> None:
        """A file that is there was left by a launcher that was killed, unless that one answers."""
        if not self._path.exists():
            return
        try:
            dial(self.find, {}, time.monotonic() + ASK_SECONDS)
        except Refused as error:
            raise LaunchError(f"{self._name}: another job meets there now; give another file") from error
        except Unreached:
            return


def meeting_of(config: Config) -> PortMeeting | FileMeeting:
    """What --rendezvous names. Raises ConfigError."""
    text = config.rendezvous
    if text.startswith(FILE):
        path = Path(text.removeprefix(FILE))
        if not path.is_absolute() or path.is_dir():
            raise ConfigError(f"--rendezvous {text}: give the absolute path of a file, as file:///shared/meet")
        return FileMeeting(path)
    found = ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise ConfigError(f"--rendezvous {text}: give host:port of node 0, as host1:29400, or file:///shared/meet")
    return PortMeeting(found["six"] or found["name"], int(found["port"]), config.orphan_timeout)
