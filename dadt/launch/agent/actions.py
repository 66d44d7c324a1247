"""What the decisions of an agent ask for: actions, which the agent carries out in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dadt.control.frame import Frame
from dadt.launch.ending.processes import Process


class TellLauncher(NamedTuple):
    """Send a frame to the launcher."""

    frame: Frame


class AnswerLine(NamedTuple):
    """Send a frame to the process at the other end of a line, if it is still open."""

    number: int
    frame: Frame


class StartAnew(NamedTuple):
    """Start a worker that joins in place of a lost one."""

    rank: int


class AdmitShim(NamedTuple):
    """Tell the shim at the other end of a line which worker to start."""

    line: int
    rank: int


class OwnWorker(NamedTuple):
    """Read, report and later stop the worker that the shim of a line has started."""

    line: int
    pid: int


class EndWorker(NamedTuple):
    """Report that the worker which the shim of a line has started, or was to start, has ended."""

    line: int
    status: int
    """As os.wait4 gives it."""
    peak_memory: int
    """The most bytes that it had."""


class SignalGroup(NamedTuple):
    """Send a signal to the process group of a worker."""

    rank: int
    number: int


class SignalProcess(NamedTuple):
    """Send a signal to one process alone, as its children have its handlers, too."""

    process: Process
    number: int


class FindHandlers(NamedTuple):
    """Find out which processes of these ranks live, and which would be killed by the signal to save, for `save`."""

    processes: Mapping[int, Process]
    number: int
    together: bool
    """Whether the ranks of all hosts save."""


class GatherStacks(NamedTuple):
    """Collect the stacks of these ranks for the launcher."""

    number: int
    ranks: Sequence[int]


class DumpStacks(NamedTuple):
    """Have all workers write their stacks, for the launcher, before they are stopped."""


class TerminateAll(NamedTuple):
    """Send SIGTERM to all processes of the job on this host."""


class KillAll(NamedTuple):
    """Kill all processes of the job on this host."""

    spares_trackers: bool
    """Leaves resource trackers to end by themselves."""


class ResetStep(NamedTuple):
    """Forget how far this rank was: another process begins to train as it."""

    rank: int


class RemoveHalves(NamedTuple):
    """Remove what a worker that has ended had not written to the end."""

    folder: str
    mark: str
    """How the names of such files begin."""


class NoteWritten(NamedTuple):
    """Note for the workers of this host what a rank of another one has written in a folder that both see."""

    rank: int
    size: int
    path: str


class HearHosts(NamedTuple):
    """Exchange heartbeats with these hosts from now on."""

    hosts: Sequence[Mapping[str, Any]]


class ProbeHosts(NamedTuple):
    """Try the addresses of other hosts, as this order says."""

    order: Frame


AgentAction = (
    TellLauncher
    | AnswerLine
    | StartAnew
    | AdmitShim
    | OwnWorker
    | EndWorker
    | SignalGroup
    | SignalProcess
    | FindHandlers
    | GatherStacks
    | DumpStacks
    | TerminateAll
    | KillAll
    | ResetStep
    | RemoveHalves
    | NoteWritten
    | HearHosts
    | ProbeHosts
)


class AgentOutbox:
    """The actions that are to be carried out, in their order."""

    def __init__(self) -> None:
        self._actions: deque[AgentAction] = deque()

    def put(self, action: AgentAction) -> None:
        self._actions.append(action)

    def tell(self, kind: str, **facts: Any) -> None:
        """Have a frame sent to the launcher."""
        self.put(TellLauncher(Frame(kind, facts)))

    def answer(self, line: int, frame: Frame) -> None:
        self.put(AnswerLine(line, frame))

    def take(self) -> AgentAction | None:
        """The next action; None where nothing is left to do."""
        return self._actions.popleft() if self._actions else None
