"""A rank that waits for its peers: where they are, when the user is warned, and when waiting is in vain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dadt.comm.executors.meet import PATIENCE
from dadt.errors import CommError, CommTimeout, Mismatch

if TYPE_CHECKING:
    from dadt.config import Config
    from dadt.control.worker_line import WorkerLine

__all__ = ["PATIENCE", "Stall"]


class Awaited(Protocol):
    """What a rank waits for."""

    @property
    def name(self) -> str: ...


class Stall:
    """One rank's waiting, and what the user has been warned of."""

    def __init__(self, config: Config, rank: int, control: WorkerLine | None, warn: Callable[[str], None]) -> None:
        self._config = config
        self._rank = rank
        self._control = control
        self._warn = warn
        self._told: Awaited | str | None = None
        """What the user was last warned of, as it is not done; None: nothing yet."""

    def look(
        self,
        work: Awaited,
        waited: float,
        steps_before: int | None,
        timeout: CommTimeout,
        parameters: str,
    ) -> None:
        """Raises Mismatch or CommTimeout where waiting on is in vain.

        waited: seconds so far. steps_before: steps that this rank had taken when it launched the work;
        None: it is at its end, where others are, too. parameters: what the work moves, for the user.
        """
        config, rank = self._config, self._rank
        peers = self._peers()
        who = _standing(peers)
        ended = [p for p in peers if str(p["said"]).startswith("has ended")]
        # One that went on after this rank has launched the work has launched it, too: its bytes are under way.
        if steps_before is not None and any(p["step"] <= steps_before for p in ended):
            raise Mismatch(f"rank {rank} is in {work.name}, {who}: the ranks do not run the same steps")
        if waited > config.timeout:
            raise CommTimeout(f"waited {waited:.0f} s in {work.name}: {who}") from timeout
        if waited > config.stall_warning and work is not self._told:
            self._told = work
            self._tell(f"rank {rank} waits in {work.name}{parameters}: {who}", timeout)

    def tell(self, what: str, waited: float, starts: bool = False) -> None:
        """This rank has waited `waited` seconds for its peers, beside the engine, in doing `what`. starts: it connects
        with them for the first time. The text is the same on all ranks, so that the user reads it once."""
        peers = self._control.peers(starts) if self._control is not None else []
        if waited > self._config.stall_warning and what != self._told:
            self._told = what
            self._warn(f"{what} takes long: {_standing(peers)}")

    def overdue(self, work: Awaited, waited: float, error: CommError) -> None:
        """Raises CommTimeout that says where the peers are, where the error is an executor's own deadline."""
        if isinstance(error, CommTimeout) or "imed out" in str(error):
            raise CommTimeout(f"waited {waited:.0f} s in {work.name}: {_standing(self._peers())}") from error

    def _peers(self) -> list[dict[str, Any]]:
        return [p for p in self._control.peers() if p["rank"] != self._rank] if self._control else []

    def _tell(self, text: str, timeout: CommTimeout) -> None:
        """Do what the user wants when a peer does not come for long."""
        config = self._config
        if config.on_stall == "abort":
            raise CommTimeout(f"{text}; waited {config.stall_warning:g} s (--on-stall abort)") from timeout
        self._warn(text)
        if config.on_stall == "dump" and self._control is not None:
            self._control.dump()


def _standing(peers: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"rank {p['rank']} {p['state']}" for p in peers) or "a peer did not come"
