"""How an agent starts the workers of its host, as the launcher has ordered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dadt.control.frame import Frame
from dadt.launch import environment
from dadt.launch.agent.worker import Worker
from dadt.launch.standard_input import NoInput


class Start:
    """The order `job`, by which workers are started once, and again where they are lost."""

    def __init__(self, job: Frame, env: Mapping[str, str], socket: Path, stdin: int | None) -> None:
        """env: of this host. socket: the agent's. stdin: what rank 0 reads."""
        self.job = job
        self._env = env
        self._socket = socket
        self._stdin = stdin
        self._nothing = NoInput(job["terminal"])

    def order(self, slot: Mapping[str, Any]) -> dict[str, Any]:
        """What a process is told that starts the worker in the agent's place."""
        told = {name: self.job[name] for name in ("cwd", "terminal")}
        return {"command": slot["command"], "env": self._env_of(slot), **told}

    def worker(self, slot: Mapping[str, Any]) -> Worker:
        """Raises LaunchError if the command cannot be run."""
        stdin = self._stdin if slot["rank"] == 0 and self._stdin is not None else self._nothing.fileno()
        return Worker.start(slot["rank"], slot["command"], self._env_of(slot), self.job["cwd"], stdin)

    def anew(self, rank: int) -> Worker:
        """A worker that joins in place of a lost one, whose input it does not read. Raises as `worker`."""
        slot = next(slot for slot in self.job["workers"] if slot["rank"] == rank)
        env = self._env_of(slot) | {"DADT_JOINS": "1"}
        return Worker.start(rank, slot["command"], env, self.job["cwd"], self._nothing.fileno())

    def _env_of(self, slot: Mapping[str, Any]) -> dict[str, str]:
        return environment.of_worker(self._env, {**self.job["env"], **slot["env"]}, self._socket)
