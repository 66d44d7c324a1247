"""Who meets whom in a simulated world: DADT's own rendezvous at the launcher, and a line of each rank to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from dadt import errors
from dadt.comm.peer_deaths import Generation
from dadt.control.frame import Frame
from dadt.control.worker_line import WorkerLine
from dadt.errors import DadtError
from dadt.launch.actions import Action, Event, Outbox, SendFrame
from dadt.launch.members.rendezvous import Rendezvous
from simulation.comm_strands import Strands, WaitPoint
from simulation.world import Broken, Process

LINE_SECONDS = 0.002
LOOK_SECONDS = 0.2
"""Seconds between the launcher's looks at the deadlines of those that wait."""
ANSWER_SECONDS = 10.0
SECRET = b"a secret of the job"


class MembersLauncher:
    """What the launcher decides of the members of a job: its rendezvous is real, and losses and joins are told as it
    tells them."""

    def __init__(self, strands: Strands, size: int) -> None:
        self.strands, self.world = strands, strands.world
        self.outbox = Outbox()
        self.rendezvous = Rendezvous([""] * size, self.outbox, self.world.now)
        self.hears: dict[int, tuple[Process, Callable[[Generation], None]]] = {}
        """For each rank its process, and what takes news of members."""
        self.newest = Generation(0, tuple(range(size)))
        self.stops = False
        self._asked: dict[int, Callable[[Frame], None]] = {}
        self._numbers = count()
        self._look()

    def _look(self) -> None:
        self.rendezvous.settle(self.world.now)
        self.act()
        if not self.stops:
            self.world.after(LOOK_SECONDS, self._look)

    def act(self) -> None:
        """Carry out what was decided: answers to questions."""
        self.outbox.empty(self._perform)

    def _perform(self, action: Action) -> None:
        if isinstance(action, SendFrame) and action.frame.kind == "answer":
            self.world.after(self.world.spread(LINE_SECONDS), lambda: self._answer(action.frame))

    def _answer(self, answer: Frame) -> None:
        header = dict(answer["answer"])
        self._asked.pop(answer["line"])(Frame(header.pop("kind"), header, answer.body))

    def ask(self, frame: Frame, answer: Callable[[Frame], None]) -> None:
        """A question of a rank has come."""
        frame.header["line"] = number = next(self._numbers)
        self._asked[number] = answer
        getattr(self.rendezvous, frame.kind)(Event(None, frame, self.world.now))  # type: ignore[arg-type]
        self.rendezvous.settle(self.world.now)
        self.act()

    def begin(self, lost: Sequence[int], text: str) -> None:
        """Begin a new generation, without these ranks."""
        self.rendezvous.regroup(lost, text, self.world.now)
        self._tell(text)

    def join(self, rank: int, text: str) -> bool:
        """Begin a new generation with this rank once more, unless all others have ended. Returns whether it has."""
        if all(member.ended for member in self.rendezvous.present):
            return False
        member = self.rendezvous.members[rank]
        member.start_anew(self.world.now)
        self.rendezvous.join([member], text, self.world.now)
        self._tell(text)
        return True

    def _tell(self, text: str) -> None:
        self.act()
        members = tuple(member.rank for member in self.rendezvous.present)
        self.newest = Generation(self.rendezvous.generation, members, members[:1], text)
        self.world.note("launcher", f"generation {self.newest.number}: ranks {members}; {text}")
        for rank in members:
            self.tell(rank)

    def ending(self, rank: int) -> None:
        """A rank's script is over."""
        member = self.rendezvous.members[rank]
        member.finished = True
        member.sign("has ended", self.world.now)

    def stepped(self, rank: int, step: int) -> None:
        """A rank has told its step."""
        self.rendezvous.members[rank].went_to(step, self.world.now)

    def finished(self, rank: int, error: Exception | None, *, survives: bool) -> None:
        """A rank's process ends. survives: whether the others train on where it has failed."""
        member = self.rendezvous.members[rank]
        member.ended = True
        member.sign("has ended" if error is None else "has failed", self.world.now)
        if error is not None and survives and not member.lost:
            self.begin([rank], f"rank {rank} has failed: {error}")

    def tell(self, rank: int) -> None:
        process, hear = self.hears[rank]
        newest = self.newest
        self.world.after(self.world.spread(LINE_SECONDS), lambda: process.get(lambda: hear(newest)))


class MemberLine(WorkerLine):
    """One rank's line to the launcher, as far as ranks meet over it."""

    secret = SECRET

    def __init__(self, launcher: MembersLauncher, process: Process, rank: int) -> None:
        self._launcher, self._process, self._rank = launcher, process, rank

    def _ask(self, kind: str, timeout: float, body: bytes = b"", **facts: Any) -> Frame:
        launcher, world = self._launcher, self._launcher.world
        answered = WaitPoint(launcher.strands)
        answers: list[Frame] = []

        def answer(frame: Frame) -> None:
            answers.append(frame)
            answered.change()

        def ask() -> None:
            if self._process.alive:
                launcher.ask(Frame(kind, {"rank": self._rank, "timeout": timeout, **facts}, body), answer)

        world.after(world.spread(LINE_SECONDS), ask)
        if not answered.wait(lambda: bool(answers), timeout + ANSWER_SECONDS):
            raise Broken(f"the launcher does not answer {kind} {facts} of rank {self._rank} in time")
        if answers[0].kind == "error":
            raise getattr(errors, answers[0]["type"], DadtError)(answers[0]["message"])
        return answers[0]

    def reconnect(self, text: str, timeout: float, generation: int) -> tuple[bool, str]:
        """What the launcher does where a connection has failed though nobody is lost: all connect anew."""
        world = self._launcher.world
        self._launcher.strands.sleep(world.spread(2 * LINE_SECONDS))
        if generation != self._launcher.rendezvous.generation:
            return True, ""
        self._launcher.begin([], f"a connection of rank {self._rank} has failed: {text}")
        return True, ""

    def peers(self, starts: bool = False) -> list[dict[str, Any]]:
        now = self._launcher.world.now
        return [{**member.describe(now), "said": member.state} for member in self._launcher.rendezvous.members]
