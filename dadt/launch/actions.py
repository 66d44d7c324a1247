"""What reaches the decisions of a launcher, and what they ask for: events and actions, without any I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from dadt.control.frame import Frame
from dadt.launch.members.node import Node

T = TypeVar("T")
Reply = Callable[[Frame, float], None]
"""Takes the answer to a question of a worker, and the time."""


class Event(NamedTuple):
    """A frame of an agent, or what has become of the connection to it (`connected`, `lost`)."""

    node: Node
    frame: Frame
    now: float
    """When it came (time.monotonic)."""


class TimeReached(NamedTuple):
    """Nothing has come, but time has passed."""

    now: float


Steps = Generator[float, Event | TimeReached, T]
"""Decisions that follow each other: each yields the time until which it waits, and gets what has come."""


class SendFrame(NamedTuple):
    """Send a frame to the agent of a node, or to all agents where none is named."""

    frame: Frame
    node: Node | None = None


class SayText(NamedTuple):
    """Show a line to the user."""

    text: str
    level: str
    """One of info and warning."""


class SayPart(NamedTuple):
    """Append to the line that the user sees last."""

    text: str
    last: bool = False
    """Whether it ends the line."""


class WriteJournal(NamedTuple):
    """Write an event into the job's journal."""

    kind: str
    facts: Mapping[str, Any]


class PrintOutput(NamedTuple):
    """Log what a worker has printed, and show it where the user wants to see it."""

    rank: int
    stream: str
    data: bytes


class EndOutput(NamedTuple):
    """Expect no more output of this rank."""

    rank: int


class MoveOutput(NamedTuple):
    """Show this rank's output with the name of another host from now on."""

    rank: int
    host: str


class WriteStacks(NamedTuple):
    """Append a rank's stacks to its file."""

    rank: int
    text: bytes


class AnswerCaller(NamedTuple):
    """Pass stacks on to the command of the user that has asked for them."""

    frame: Frame


class ReachHost(NamedTuple):
    """Begin to start the agent of a host that comes into the running job."""

    node: Node


class AskHost(NamedTuple):
    """Ask the agent of a host that comes into the running job to report about the host."""

    node: Node
    place: int


class GiveUpHost(NamedTuple):
    """End the agent of a host that cannot come."""

    node: Node


class DismissHosts(NamedTuple):
    """End the agents of these hosts, which get no workers."""

    nodes: Sequence[Node]


class StartWorkers(NamedTuple):
    """Order the agent of a host that has come to start the workers of its place."""

    node: Node
    place: int


Action = (
    SendFrame
    | SayText
    | SayPart
    | WriteJournal
    | PrintOutput
    | EndOutput
    | MoveOutput
    | WriteStacks
    | AnswerCaller
    | ReachHost
    | AskHost
    | GiveUpHost
    | DismissHosts
    | StartWorkers
)


def unknown(action: NoReturn) -> NoReturn:
    """Refuse an action that nothing carries out, which a check of types finds before."""
    raise AssertionError(action)


class Outbox:
    """The actions that are to be carried out, in their order."""

    def __init__(self) -> None:
        self._actions: deque[Action] = deque()

    def put(self, action: Action) -> None:
        self._actions.append(action)

    def send(self, node: Node, frame: Frame) -> None:
        self.put(SendFrame(frame, node))

    def send_all(self, frame: Frame) -> None:
        self.put(SendFrame(frame))

    def say(self, text: str, level: str = "info") -> None:
        self.put(SayText(text, level))

    def note(self, kind: str, **facts: Any) -> None:
        """Have an event written into the job's journal."""
        self.put(WriteJournal(kind, facts))

    def reply(self, question: Event) -> Reply:
        """Return a function that sends the answer to this question of a worker."""

        def answer(frame: Frame, now: float) -> None:
            header = {"line": question.frame["line"], "answer": {"kind": frame.kind, **frame.header}}
            self.send(question.node, Frame("answer", header, frame.body))

        return answer

    def empty(self, perform: Callable[[Action], None]) -> None:
        """Have all actions carried out, in their order."""
        while self._actions:
            perform(self._actions.popleft())

    def take_quiet(self) -> Sequence[Action]:
        """All actions that do not wait for the user to read the output, ahead of the others."""
        quiet = [action for action in self._actions if isinstance(action, SendFrame | WriteJournal)]
        self._actions = deque(action for action in self._actions if not isinstance(action, SendFrame | WriteJournal))
        return quiet
