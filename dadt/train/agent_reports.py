"""Handles what a rank's agent reports during training: the ends of other ranks, and requests to all ranks."""

from __future__ import annotations

from contextlib import suppress

from dadt.comm.peer_deaths import Generation
from dadt.control.frame import Frame
from dadt.errors import DadtError
from dadt.train.approaches import Approach
from dadt.train.attachments import Attachments
from dadt.train.common_step import CommonStep
from dadt.train.ranks import Ranks


class AgentReports:
    """Passes each report of the agent to the object in this process that handles it, on the thread that listens to the
    agent."""

    def __init__(self, ranks: Ranks, attachments: Attachments) -> None:
        self._ranks, self._attachments = ranks, attachments

    def listen(self) -> None:
        """Start to receive the agent's reports. Does nothing if already started."""
        ranks = self._ranks
        if ranks.control is not None and not ranks.alone and not ranks.deaths.listening:
            ranks.deaths.listening = ranks.control.listen(self._hear)

    def _find_steps(self) -> None:
        """Let ranks find common steps over the launcher, if an exchange does not connect all of them, as in islands, or
        belongs to no step, as with `local`. A mesh of the script's own may divide ranks after this rank has begun to
        listen."""
        ranks = self._ranks
        if ranks.control is not None and (ranks.world.parts > 1 or ranks.config.algorithm == "local"):
            in_islands = ranks.world.island_size > 1
            common_step = CommonStep(
                ranks.control.exchange, ranks.deaths.await_newer, ranks.step, in_islands=in_islands
            )
            ranks.requests.agree_by(common_step)
            ranks.requests.checkpoint_signal.together = ranks.together
            ranks.requests.checkpoint_signal.unable = self._tell_unable

    def _tell_unable(self, number: int) -> None:
        """Tell the user that this rank's island does not save for the order of this number."""
        ranks, size = self._ranks, self._ranks.world.island_size
        first = ranks.world.rank - ranks.world.rank % size
        island = f"the island of ranks {first} to {first + size - 1}"
        with suppress(DadtError):  # the job is ending, and its agent is gone
            text = f"{island} has not saved for checkpoint signal {number}, as not all of its ranks take steps"
            ranks.say(text, "warning")

    def _hear(self, frame: Frame) -> None:
        ranks, requests = self._ranks, self._ranks.requests
        if not requests.finds_steps:
            self._find_steps()
        if frame.kind == "preempted":
            ranks.deaths.preempted = True
        elif frame.kind == "approach":
            approach = Approach(frame["number"], frame["rank"], tuple(frame["known"]), frame["last"])
            requests.hear_approach(approach, ranks.config.timeout)
        elif frame.kind == "proposal":
            requests.hear_proposal(frame["key"], ranks.config.timeout)
        elif frame.kind == "interrupt":
            if not ranks.closing:  # a rank whose script is over ignores Ctrl-C, as all ranks are about to end
                together = ranks.together and len(self._attachments) > 0
                requests.interruption.hear(frame["patience"] if together else 0.0)
        elif frame.kind == "save":
            together = ranks.together or ranks.world.island_size > 1
            requests.checkpoint_signal.hear(frame["patience"] if together else 0.0, frame["count"])
        elif frame.kind == "regroup":
            self._regroup(frame)
        elif (steps := frame.get("steps")) is None:
            ranks.deaths.tell(frame["text"])
        # If DADT manages no optimizer, only the script knows whether that other rank has ended too early.
        elif len(self._attachments) > 0:
            ranks.deaths.tell_left(frame["text"], steps, ranks.step)

    def _regroup(self, frame: Frame) -> None:
        ranks = self._ranks
        ranks.requests.approaches.forget()
        members, firsts = tuple(frame["members"]), tuple(frame["firsts"])
        handed, writers = frame.get("handed", 0), tuple(frame.get("writers", ()))
        ranks.deaths.regroup(Generation(frame["generation"], members, firsts, frame["text"], handed, writers))
        # A rank that has no connection yet is already connecting, so it need not reconnect.
        if not ranks.together and ranks.connection is not None:
            ranks.reconnection.begin()
