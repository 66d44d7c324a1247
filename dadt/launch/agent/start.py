"""Starts the workers of a host, as the launcher has ordered the agent."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dadt.control.frame import Frame
from dadt.launch.agent.error_file import ErrorFile
from dadt.launch.agent.worker import Worker
from dadt.launch.start import environment
from dadt.launch.start.standard_input import NoInput


class WorkerStart:
    """Starts the workers of the launcher's order `job`, and later replacements of lost workers."""

    def __init__(self, job: Frame, env: Mapping[str, str], socket: Path, stdin: int | None) -> None:
        """env: base environment of this host. socket: path of the agent's socket. stdin: descriptor of rank 0's
        standard input."""
        self.job = job
        self._env = env
        self._socket = socket
        self._stdin = stdin
        self._nothing = NoInput(job["terminal"])
        self._error_files = {slot["rank"]: ErrorFile(socket, slot["rank"]) for slot in job["workers"]}

    def order(self, rank: int) -> dict[str, Any]:
        """Return the fields of the order for the shim that starts this rank's worker in the agent's place."""
        slot = self._slot(rank)
        told = {name: self.job[name] for name in ("cwd", "terminal")}
        return {"command": slot["command"], "env": self._env_of(slot), **told}

    def worker(self, slot: Mapping[str, Any]) -> Worker:
        """Start the worker of this slot. Raises LaunchError if the command cannot be run."""
        stdin = self._stdin if slot["rank"] == 0 and self._stdin is not None else self._nothing.fileno()
        return Worker.start(slot["rank"], slot["command"], self._env_of(slot), self.job["cwd"], stdin)

    def anew(self, rank: int) -> Worker:
        """Start a new worker for a rank whose worker was lost, with an empty standard input. Raises LaunchError if the
        command cannot be run."""
        slot = self._slot(rank)
        env = self._env_of(slot) | {"DADT_JOINS": "1"}
        return Worker.start(rank, slot["command"], env, self.job["cwd"], self._nothing.fileno())

    def _slot(self, rank: int) -> Mapping[str, Any]:
        return next(slot for slot in self.job["workers"] if slot["rank"] == rank)

    def _env_of(self, slot: Mapping[str, Any]) -> dict[str, str]:
        own = self._error_files[slot["rank"]].prepare() if "RANK" in slot["env"] else {}
        return environment.of_worker(self._env, {**self.job["env"], **slot["env"], **own}, self._socket)

    def failures(self, worker: Worker, known: Collection[int]) -> list[Frame]:
        """Return the frame that reports the exception in the error file of a worker that failed, in a list; an empty
        list if there is none. known: ranks that have already reported their exception themselves."""
        failed = worker.returncode > 0 and worker.rank not in known
        failure = self._error_files[worker.rank].failure(worker.pid) if failed else None
        return [failure] if failure is not None else []
