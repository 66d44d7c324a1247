"""Types for the code that decides what the launcher does and that does no I/O itself: the events passed to it, and the
actions that it requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from dadt.control.frame import Frame
from dadt.launch.members.node import Node

T = TypeVar("T")
Reply = Callable[[Frame, float], None]
"""Function that is called with the answer to a worker's question, and with the current time in seconds."""


class Event(NamedTuple):
    """A frame that an agent has sent, or a pseudo-frame (`connected` or `lost`) for a change of the connection to the
    agent."""

    node: Node
    frame: Frame
    now: float
    """Time at which the frame arrived, in seconds of time.monotonic."""


class TimeReached(NamedTuple):
    """Passed instead of an Event when time has passed without a frame."""

    now: float


Steps = Generator[float, Event | TimeReached, T]
"""Generator that makes decisions of the launcher: it yields the time until which it waits, receives an Event or
TimeReached, and finally returns its result."""


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
    """Action: record that no more output of this rank follows."""

    rank: int


class MoveOutput(NamedTuple):
    """Action: label this rank's output with the name of another host from now on, because the rank has moved there."""

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
    """Action: begin to start the agent on a host that is to join the running job."""

    node: Node


class AskHost(NamedTuple):
    """Action: request the report about its host from an agent that has just connected. place: number of the host in the
    job."""

    node: Node
    place: int


class GiveUpHost(NamedTuple):
    """Action: end the agent of a host that cannot join the job."""

    node: Node


class DismissHosts(NamedTuple):
    """Action: end the agents of hosts that get no workers."""

    nodes: Sequence[Node]


class StartWorkers(NamedTuple):
    """Action: order the agent of a host that has joined the running job to start the workers there. place: number of
    the host in the job."""

    node: Node
    place: int


StartAction = SendFrame | SayText | SayPart | AskHost | DismissHosts
"""An action that can be requested during the startup of a job, when there are no workers yet."""
OutputAction = PrintOutput | EndOutput | MoveOutput | WriteStacks
Action = StartAction | OutputAction | WriteJournal | AnswerCaller | ReachHost | GiveUpHost | StartWorkers


def unknown(action: NoReturn) -> NoReturn:
    """Raise AssertionError because no code handles this type of action. Type checkers report an unhandled type before
    the program runs."""
    raise AssertionError(action)


PRINTS = (SayText, SayPart, PrintOutput, EndOutput, MoveOutput, WriteStacks)
"""Actions that print, or whose order relative to printed output of the same rank matters. They wait while the
launcher's output is read too slowly."""


class ActionQueue(Generic[T]):
    """A queue of requested actions, which are carried out in their order."""

    def __init__(self) -> None:
        self._actions: deque[T] = deque()

    def put(self, action: T) -> None:
        self._actions.append(action)

    def empty(self, perform: Callable[[T], None]) -> None:
        """Call `perform` with every queued action, in their order, until the queue is empty."""
        while self._actions:
            perform(self._actions.popleft())


class Outbox(ActionQueue[Action]):
    """The queue of the actions that the launcher's decisions request."""

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
        """Return a function that sends its argument to the worker that asked `question`."""

        def answer(frame: Frame, now: float) -> None:
            header = {"line": question.frame["line"], "answer": {"kind": frame.kind, **frame.header}}
            self.send(question.node, Frame("answer", header, frame.body))

        return answer

    def take_quiet(self) -> Sequence[Action]:
        """Remove and return those actions in the queue that print nothing, so that they need not wait while output is
        blocked."""
        quiet = [action for action in self._actions if not isinstance(action, PRINTS)]
        self._actions = deque(action for action in self._actions if isinstance(action, PRINTS))
        return quiet
