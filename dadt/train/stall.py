"""Handles long waits of a rank for its peers: finds out in which step they are, warns the user, and raises an error if
waiting longer is useless."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dadt.comm.executors.meet import PATIENCE
from dadt.config import Config
from dadt.control.worker_line import WorkerLine
from dadt.errors import CommError, CommTimeout, Mismatch

__all__ = ["PATIENCE", "Stall"]


class Awaited(Protocol):
    """Interface of an operation that a rank waits for."""

    @property
    def name(self) -> str: ...

    @property
    def done(self) -> bool: ...


class Stall:
    """Handles the long waits of one rank, and remembers the last warning about them."""

    def __init__(self, config: Config, rank: int, control: WorkerLine | None, warn: Callable[[str], None]) -> None:
        self._config = config
        self._rank = rank
        self._control = control
        self._warn = warn
        self._told: Awaited | str | None = None
        """The operation or activity of the last warning, so that each is reported once; None before the first warning.
        """

    def look(
        self,
        work: Awaited,
        waited: float,
        launched: Callable[[Mapping[str, Any]], bool],
        timeout: CommTimeout,
        parameters: str,
    ) -> None:
        """Warn of a long wait, or raise Mismatch or CommTimeout if waiting longer is useless.

        waited: seconds so far. launched: function that returns whether a peer that has ended launched the work before
        its end, so that its data still arrives. parameters: names of the parameters that the work averages, for the
        message.
        """
        config, rank = self._config, self._rank
        peers = self._peers()
        if work.done:  # the work was completed meanwhile, for example after this machine was suspended
            return
        who = _standing(peers)
        ended = [p for p in peers if str(p["said"]).startswith("has ended")]
        if not all(map(launched, ended)):
            raise Mismatch(f"rank {rank} is in {work.name}, {who}: the ranks do not run the same steps")
        if waited > config.timeout:
            raise CommTimeout(f"waited {waited:.0f} s in {work.name}: {who}") from timeout
        if waited > config.stall_warning and work is not self._told:
            self._told = work
            self._tell(f"rank {rank} waits in {work.name}{parameters}: {who}", timeout)

    def tell(self, what: str, waited: float, starts: bool = False) -> None:
        """Report a wait outside the C++ engine: this rank has waited `waited` seconds for its peers while it did
        `what`. starts: whether the rank connects for the first time. The warning has the same text on all ranks, so
        that the user sees it once.
        """
        peers = self._control.peers(starts) if self._control is not None else []
        if waited > self._config.stall_warning and what != self._told:
            self._told = what
            self._warn(f"{what} takes long: {_standing(peers)}")

    def overdue(self, work: Awaited, waited: float, error: CommError) -> None:
        """If the error is an executor's own timeout, raise CommTimeout with a message that says in which step the peers
        are."""
        if isinstance(error, CommTimeout) or "imed out" in str(error):
            raise CommTimeout(f"waited {waited:.0f} s in {work.name}: {_standing(self._peers())}") from error

    def _peers(self) -> list[dict[str, Any]]:
        return [p for p in self._control.peers() if p["rank"] != self._rank] if self._control else []

    def _tell(self, text: str, timeout: CommTimeout) -> None:
        """Act on a long wait as `--on-stall` says: warn, dump all ranks' stacks, or raise CommTimeout."""
        config = self._config
        if config.on_stall == "abort":
            raise CommTimeout(f"{text}; waited {config.stall_warning:g} s (--on-stall abort)") from timeout
        self._warn(text)
        if config.on_stall == "dump" and self._control is not None:
            self._control.dump()


def _standing(peers: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"rank {p['rank']} {p['state']}" for p in peers) or "a peer did not come"
