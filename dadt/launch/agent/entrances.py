"""The sockets at which an agent listens to its workers, which it creates again if a cleaner of /tmp removes their
folder."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from dadt.control.accept import Entrance, listen_at
from dadt.control.frame import Frame
from dadt.control.job_folder import Folder, line_of
from dadt.errors import LaunchError
from dadt.launch.agent.launcher_line import LauncherLine

LOOK_SECONDS = 0.5
BACKLOG = 128


@dataclass(eq=False)
class Entrances:
    """The sockets at which workers connect, one per rank. A removed socket is created again, since workers open a new
    connection for each question."""

    _folder: Folder
    _ranks: Mapping[int, int]
    """Local rank of each rank."""
    _launcher: LauncherLine
    _accept: Callable[[int, Entrance], None]
    _drop: Callable[[socket.socket], None]
    """Function that closes a connection whose process has not proved that it belongs to the job, to make room for
    another one."""
    _looked: float = 0.0

    def __post_init__(self) -> None:
        self._entrances = {rank: Entrance(self._listen(rank), self._drop) for rank in self._ranks}
        for rank in self._ranks:
            self._watch(rank)

    def tend(self) -> None:
        """Create removed sockets again. This may be called at any time, but checks only every LOOK_SECONDS seconds."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        try:
            self._folder.tend()
            gone = [
                rank for rank in self._ranks if not os.path.lexists(line_of(self._folder.socket, self._ranks[rank]))
            ]
            for rank in gone:
                self._renew(rank)
        except (OSError, LaunchError):
            return  # a later call tries again; until then, workers that connect get an error
        if gone:
            text = (
                f"{self._folder.path} was removed while the job runs, by a cleaner of /tmp or by hand, and was made "
                "again; files that ranks kept apart there are lost"
            )
            about = {"line": 0, "rank": gone[0], "pid": os.getpid(), "text": text, "level": "warning"}
            self._launcher.send(Frame("say", about))

    def close(self) -> None:
        for entrance in self._entrances.values():
            self._launcher.forget(entrance.server.fileno())
            entrance.close()

    def _renew(self, rank: int) -> None:
        server = self._listen(rank)
        self._accept(rank, self._entrances[rank])  # those that connected before their socket was removed
        self._launcher.forget(self._entrances[rank].server.fileno())
        self._entrances[rank].renew(server)
        self._watch(rank)

    def _watch(self, rank: int) -> None:
        entrance = self._entrances[rank]
        self._launcher.watch(entrance.server.fileno(), partial(self._accept, rank, entrance))

    def _listen(self, rank: int) -> socket.socket:
        return listen_at(line_of(self._folder.socket, self._ranks[rank]), BACKLOG)
