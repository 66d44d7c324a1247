"""The report to the user of ranks that have waited for others for long, and the stacks of those others."""

from __future__ import annotations

from collections.abc import Callable

from dadt.config import Config
from dadt.control.frame import Frame
from dadt.launch.monitor.members import Rendezvous
from dadt.launch.monitor.output import Output
from dadt.launch.monitor.stacks import Stacks


class Stalls:
    """One per attempt. Ranks that wait in an exchange say so themselves, and those that wait at the launcher do not."""

    def __init__(
        self,
        config: Config,
        rendezvous: Rendezvous,
        output: Output,
        order: Callable[[Frame], None],
        say: Callable[[str, str], None],
    ) -> None:
        """order: sends a frame to all agents."""
        self._config = config
        self._rendezvous = rendezvous
        self.stacks = Stacks(output, say)
        self._order = order
        self._say = say

    def turn(self) -> None:
        """Call it as time passes."""
        for stall in self._rendezvous.stalled(self._config.stall_warning):
            *most, last = map(str, sorted(stall.ranks))
            who = f"ranks {', '.join(most)} and {last} wait" if most else f"rank {last} waits"
            self._say(f"{who} for {stall.key!r}: {', '.join(member.named for member in stall.missing)}", "warning")
            if self._config.on_stall == "dump" and any(member.step > 0 for member in self._rendezvous.members):
                self.dump()

    def dump(self) -> None:
        """Have all ranks write their stacks, unless that was done just before."""
        if (order := self.stacks.wanted(self._rendezvous.members)) is not None:
            self._order(order)
