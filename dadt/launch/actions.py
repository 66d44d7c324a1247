"""What reaches the decisions of a launcher, and what they ask for: events and actions, without any I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from dadt.control.frame import Frame
from dadt.launch.members.node import Node

Reply = Callable[[Frame, float], None]
"""Takes the answer to a question of a worker, and the time."""


class Event(NamedTuple):
    """A frame of an agent, or what has become of the connection to it (`connected`, `lost`)."""

    node: Node
    frame: Frame
    now: float
    """When it came (time.monotonic)."""


class SendFrame(NamedTuple):
    """Send a frame to the agent of a node, or to all agents where none is named."""

    frame: Frame
    node: Node | None = None


class SayText(NamedTuple):
    """Show a line to the user."""

    text: str
    level: str
    """One of info and warning."""


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


class StartWorkers(NamedTuple):
    """Order the agent of a host that has come to start the workers of its place."""

    node: Node
    place: int


Action = (
    SendFrame
    | SayText
    | WriteJournal
    | PrintOutput
    | EndOutput
    | MoveOutput
    | WriteStacks
    | AnswerCaller
    | ReachHost
    | AskHost
    | GiveUpHost
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
        """A function that answers this question of a worker."""

        def answer(frame: Frame, now: float) -> None:
            header = {"line": question.frame["line"], "answer": {"kind": frame.kind, **frame.header}}
            self.send(question.node, Frame("answer", header, frame.body))

        return answer

    def take(self) -> Action | None:
        """The next action; None where nothing is left to do."""
        return self._actions.popleft() if self._actions else None

    def take_quiet(self) -> Sequence[Action]:
        """All actions that do not wait for the user to read the output, ahead of the others."""
        quiet = [action for action in self._actions if isinstance(action, SendFrame | WriteJournal)]
        self._actions = deque(action for action in self._actions if not isinstance(action, SendFrame | WriteJournal))
        return quiet
