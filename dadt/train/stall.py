"""A rank that waits for its peers: where they are, when the user is told, and when waiting is in vain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dadt.errors import CommError, CommTimeout, Mismatch

if TYPE_CHECKING:
    from dadt._core import Work
    from dadt.comm.executors.device import Averaging
    from dadt.train.runtime import Runtime

PATIENCE = 3.0
"""Seconds of waiting after which a rank looks where its peers are."""


class Stall:
    """What becomes of one rank's waiting. Knows what the user has been told."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._told: Work | Averaging | None = None
        """The user knows that this one is not done."""

    def look(self, work: Work | Averaging, waited: float, timeout: CommTimeout, *, closing: bool) -> None:
        """Raises where waiting on is in vain.

        waited: seconds so far. closing: the rank itself is at its end, where others are, too.
        """
        runtime = self._runtime
        config, rank = runtime.config, runtime.world.rank
        peers = self._peers()
        who = _standing(peers)
        ended = [p for p in peers if str(p["said"]).startswith("has ended")]
        # One that went on after this rank has launched the work has launched it, too: its bytes are under way.
        if not closing and any(p["step"] <= runtime.steps_before(work) for p in ended):
            self._give_up()
            raise Mismatch(f"rank {rank} is in {work.name}, {who}: the ranks do not run the same steps")
        if waited > config.timeout:
            self._give_up()
            raise CommTimeout(f"waited {waited:.0f} s in {work.name}: {who}") from timeout
        if waited > config.stall_warning and work is not self._told:
            self._told = work
            self._tell(f"rank {rank} waits in {work.name}{self._parameters_of(work)}: {who}", timeout)

    def overdue(self, work: Work | Averaging, waited: float, error: CommError) -> None:
        """Raises CommTimeout that says where the peers are, where the error is an executor's own deadline."""
        if isinstance(error, CommTimeout) or "imed out" in str(error):
            raise CommTimeout(f"waited {waited:.0f} s in {work.name}: {_standing(self._peers())}") from error

    def _peers(self) -> list[dict[str, Any]]:
        control, rank = self._runtime.control, self._runtime.world.rank
        return [p for p in control.peers() if p["rank"] != rank] if control else []

    def _give_up(self) -> None:
        self._runtime.engine.abort(f"rank {self._runtime.world.rank} gave up waiting")

    def _tell(self, text: str, timeout: CommTimeout) -> None:
        """What the user wants to happen where a peer does not come for long."""
        config, control = self._runtime.config, self._runtime.control
        if config.on_stall == "abort":
            self._give_up()
            raise CommTimeout(f"{text}; waited {config.stall_warning:g} s (--on-stall abort)") from timeout
        self._runtime.say(text, level="warning")
        if config.on_stall == "dump" and control is not None:
            control.dump()

    def _parameters_of(self, work: Work | Averaging) -> str:
        """The names of what an exchange's work moves, as far as known: " (fc.weight and 3 more)"."""
        roots = self._runtime.roots.values()
        modules = [m for refs in roots for ref in refs if (m := ref()) is not None]
        names = {id(p): name for module in modules for name, p in module.named_parameters()}
        for exchange in self._runtime.in_flight:
            known = [names[id(t)] for t in exchange.tensors_of(work) if id(t) in names]
            if known:
                return f" ({known[0]}" + (f" and {len(known) - 1} more)" if known[1:] else ")")
        return ""


def _standing(peers: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"rank {p['rank']} {p['state']}" for p in peers) or "a peer did not come"
