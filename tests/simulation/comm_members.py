"""Who meets whom in a simulated world: DADT's own rendezvous at the launcher, and a line of each rank to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from dadt import errors
from dadt.comm.peer_deaths import Generation
from dadt.control.frame import Frame
from dadt.control.worker_line import WorkerLine
from dadt.errors import DadtError
from dadt.launch.actions import Action, Event, Outbox, SendFrame
from dadt.launch.members.membership import EXPLAIN_SECONDS, TRIALS
from dadt.launch.members.rendezvous import Rendezvous
from simulation.comm_strands import Strands, WaitPoint
from simulation.world import Broken, Process

LINE_SECONDS = 0.002
LOOK_SECONDS = 0.2
"""Seconds between the launcher's looks at the deadlines of those that wait."""
ANSWER_SECONDS = 10.0
LATE_SECONDS = 1.0
"""How late the launcher may be with an answer."""
SECRET = b"a secret of the job"


@dataclass(slots=True)
class Reconnecting:
    """A rank's question whether all connect anew."""

    begun: float
    why: str
    anew: bool | None = None
    """The answer."""


class MembersLauncher:
    """What the launcher decides of the members of a job: its rendezvous is real, and losses and joins are told as it
    tells them."""

    def __init__(self, strands: Strands, size: int, kill: Callable[[int], None]) -> None:
        """kill: kills the process of a rank."""
        self._kill = kill
        self.strands, self.world = strands, strands.world
        self.outbox = Outbox()
        self.rendezvous = Rendezvous([""] * size, self.outbox, self.world.now)
        self.hears: dict[int, tuple[Process, Callable[[Generation], None]]] = {}
        """For each rank its process, and what takes news of members."""
        self.newest = Generation(0, tuple(range(size)))
        self.stops = False
        self.answered = WaitPoint(strands)
        self._requests: dict[int, Reconnecting] = {}
        self._trials = 0
        """How often all have connected anew since the newest step."""
        self._tried_at = -1
        self._asked: dict[int, tuple[Frame, Callable[[Frame], None]]] = {}
        """Questions that wait, each with what takes the answer."""
        self._begun = 0.0
        """When the newest generation has begun."""
        self._numbers = count()
        self._look()

    def _look(self) -> None:
        self.rendezvous.settle(self.world.now)
        self.act()
        self._connect_anew()
        self._check_asked()
        if not self.stops:
            self.world.after(LOOK_SECONDS, self._look)

    def act(self) -> None:
        """Carry out what was decided: answers to questions."""
        self.outbox.empty(self._perform)

    def _perform(self, action: Action) -> None:
        if isinstance(action, SendFrame) and action.frame.kind == "answer":
            header, _, answer = dict(action.frame["answer"]), *self._asked.pop(action.frame["line"])
            frame = Frame(header.pop("kind"), header, action.frame.body)
            self.world.after(self.world.spread(LINE_SECONDS), lambda: answer(frame))

    def ask(self, frame: Frame, answer: Callable[[Frame], None]) -> None:
        """A question of a rank has come."""
        frame.header["line"] = number = next(self._numbers)
        self._asked[number] = frame, answer
        getattr(self.rendezvous, frame.kind)(Event(None, frame, self.world.now))  # type: ignore[arg-type]
        self.rendezvous.settle(self.world.now)
        self.act()

    def _check_asked(self) -> None:
        """No rank waits for those of an older generation."""
        newest = self.rendezvous.generation
        for frame, _ in self._asked.values() if self.world.now - self._begun > LATE_SECONDS else ():
            if (generation := frame.get("generation", 0)) < newest:
                what = f"waits since generation {generation}, and generation {newest} has begun"
                raise Broken(f"rank {frame['rank']} {what}: {frame.kind} {frame.get('key', '')}")

    def begin(self, lost: Sequence[int], text: str) -> None:
        """Begin a new generation, without these ranks."""
        self.rendezvous.regroup(lost, text, self.world.now)
        self._tell(text)

    def reconnect(self, rank: int, text: str, generation: int) -> Reconnecting:
        """A rank asks whether all connect anew, as a connection of it has failed."""
        request = Reconnecting(self.world.now, f"a connection of rank {rank} has failed: {text}")
        if generation == self.rendezvous.generation:
            self._requests[rank] = request
        else:
            request.anew = True
        return request

    def _connect_anew(self) -> None:
        """What `Membership._connect_anew` decides where each rank trains at its own speed."""
        here = [member for member in self.rendezvous.members if not (member.lost or member.ended)]
        first = min(self._requests.values(), key=lambda request: request.begun, default=None)
        if first is None or not here or self.world.now - first.begun < EXPLAIN_SECONDS:
            return
        if (step := max(member.step for member in here)) > self._tried_at:
            self._trials = 0
        self._tried_at = step
        if new := [member.rank for member in here if member.joined and member.step < 0]:
            for rank in new:
                self._kill(rank)
            self.begin(new, f"{first.why}: since ranks {new} joined, connecting fails")
        elif len(here) < len(self.rendezvous.present) or self._trials == TRIALS:
            self._answer_all(anew=False)
        else:
            self._trials += 1
            self.begin([], first.why)

    def _answer_all(self, *, anew: bool) -> None:
        for request in self._requests.values():
            request.anew = anew
        self._requests.clear()
        self.answered.change()

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
        self._begun = self.world.now
        members = tuple(member.rank for member in self.rendezvous.present)
        self.newest = Generation(self.rendezvous.generation, members, members[:1], text)
        self.world.note("launcher", f"generation {self.newest.number}: ranks {members}; {text}")
        for rank in members:
            self.tell(rank)
        self._answer_all(anew=True)

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
        self._launcher.strands.sleep(self._launcher.world.spread(2 * LINE_SECONDS))
        request = self._launcher.reconnect(self._rank, text, generation)
        self._launcher.answered.wait(lambda: request.anew is not None, timeout)
        return bool(request.anew), ""

    def peers(self, starts: bool = False) -> list[dict[str, Any]]:
        now = self._launcher.world.now
        return [{**member.describe(now), "said": member.state} for member in self._launcher.rendezvous.members]
