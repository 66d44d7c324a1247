"""Input and output of the launcher's decisions, which do no I/O themselves: events that reach them, and actions that
they ask for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from dadt.control.frame import Frame
from dadt.launch.members.node import Node

T = TypeVar("T")
Reply = Callable[[Frame, float], None]
"""Called with the answer to a worker's question, and the current time in seconds."""


class Event(NamedTuple):
    """A frame that an agent has sent, or a change of the connection to the agent (frames `connected` and `lost`)."""

    node: Node
    frame: Frame
    now: float
    """Time at which the frame came, in seconds of time.monotonic."""


class TimeReached(NamedTuple):
    """Passed instead of an Event when time has passed without a frame."""

    now: float


Steps = Generator[float, Event | TimeReached, T]
"""Generator of launcher decisions: yields the time until which it waits, receives an Event or TimeReached, and returns
its result."""


class SendFrame(NamedTuple):
    """Action: send a frame to one node's agent, or to all agents if `node` is None."""

    frame: Frame
    node: Node | None = None


class SayText(NamedTuple):
    """Action: show a line of text to the user."""

    text: str
    level: str
    """Kind of message: `info` or `warning`."""


class SayPart(NamedTuple):
    """Action: append text to the newest line shown to the user."""

    text: str
    last: bool = False
    """Whether the text completes the line."""


class WriteJournal(NamedTuple):
    """Action: write an event into the job's journal."""

    kind: str
    facts: Mapping[str, Any]


class PrintOutput(NamedTuple):
    """Action: log what a worker has printed, and show it to the user if wanted."""

    rank: int
    stream: str
    data: bytes


class EndOutput(NamedTuple):
    """Action: expect no more output of this rank."""

    rank: int


class MoveOutput(NamedTuple):
    """Action: label this rank's output with the name of another host from now on."""

    rank: int
    host: str


class WriteStacks(NamedTuple):
    """Action: append stack traces of a rank to the rank's file."""

    rank: int
    text: bytes


class AnswerCaller(NamedTuple):
    """Action: send stack traces to the `dadt` command with which the user asked for them."""

    frame: Frame


class ReachHost(NamedTuple):
    """Action: begin to start the agent of a host that joins the running job."""

    node: Node


class AskHost(NamedTuple):
    """Action: ask the agent of a host that joins the running job to report about the host. place: number of the host in
    the job."""

    node: Node
    place: int


class GiveUpHost(NamedTuple):
    """Action: end the agent of a host that cannot join the job."""

    node: Node


class DismissHosts(NamedTuple):
    """Action: end the agents of hosts that get no workers."""

    nodes: Sequence[Node]


class StartWorkers(NamedTuple):
    """Action: order the agent of a host that has joined the running job to start its workers. place: number of the host
    in the job."""

    node: Node
    place: int


StartAction = SendFrame | SayText | SayPart | AskHost | DismissHosts
"""An action that the startup of a job decides on, before there are workers."""
OutputAction = PrintOutput | EndOutput | MoveOutput | WriteStacks
Action = StartAction | OutputAction | WriteJournal | AnswerCaller | ReachHost | GiveUpHost | StartWorkers


def unknown(action: NoReturn) -> NoReturn:
    """Raises AssertionError for an action of an unhandled type; type checkers report such a type before the program
    runs."""
    raise AssertionError(action)


PRINTS = (SayText, SayPart, PrintOutput, EndOutput, MoveOutput, WriteStacks)
"""Actions that print, or that must keep their order with printed output of the same rank; they wait while the reader of
the output is slow."""


class ActionQueue(Generic[T]):
    """Actions that were decided on, to be carried out in their order."""

    def __init__(self) -> None:
        self._actions: deque[T] = deque()

    def put(self, action: T) -> None:
        self._actions.append(action)

    def empty(self, perform: Callable[[T], None]) -> None:
        """Call `perform` with every queued action, in their order, until the queue is empty."""
        while self._actions:
            perform(self._actions.popleft())


class Outbox(ActionQueue[Action]):
    """Queue of the actions that the launcher has decided on."""

    def send(self, node: Node, frame: Frame) -> None:
        self.put(SendFrame(frame, node))

    def send_all(self, frame: Frame) -> None:
        self.put(SendFrame(frame))

    def say(self, text: str, level: str = "info") -> None:
        self.put(SayText(text, level))

    def note(self, kind: str, **facts: Any) -> None:
        """Queue an action that writes an event into the job's journal."""
        self.put(WriteJournal(kind, facts))

    def reply(self, question: Event) -> Reply:
        """Return a function that sends the answer to this question of a worker."""

        def answer(frame: Frame, now: float) -> None:
            header = {"line": question.frame["line"], "answer": {"kind": frame.kind, **frame.header}}
            self.send(question.node, Frame("answer", header, frame.body))

        return answer

    def take_quiet(self) -> Sequence[Action]:
        """Remove from the queue, and return, the actions that do not print anything and so need not wait for blocked
        output."""
        quiet = [action for action in self._actions if not isinstance(action, PRINTS)]
        self._actions = deque(action for action in self._actions if isinstance(action, PRINTS))
        return quiet
