"""Actions that HostJob, which decides for an agent without doing I/O, requests and that the agent carries out in
order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from dadt.control.frame import Frame
from dadt.launch.actions import ActionQueue
from dadt.launch.ending.processes import Process


class TellLauncher(NamedTuple):
    """Action: send a frame to the launcher."""

    frame: Frame


class AnswerLine(NamedTuple):
    """Action: send a frame to the process at the other end of connection `number`, if it is still open."""

    number: int
    frame: Frame


class StartAnew(NamedTuple):
    """Action: start a worker that replaces a lost one."""

    rank: int


class AdmitShim(NamedTuple):
    """Action: send the shim on connection `line` the order to start the worker of this rank."""

    line: int
    rank: int


class OwnWorker(NamedTuple):
    """Action: manage the worker that the shim on connection `line` has started: read its output, report about it, and
    stop it later."""

    line: int
    pid: int


class EndWorker(NamedTuple):
    """Action: report the end of a worker that the shim on connection `line` has started or was to start."""

    line: int
    status: int
    """Exit status, in the format of os.wait4."""
    peak_memory: int
    """Largest number of bytes of memory that the worker used."""


class SignalGroup(NamedTuple):
    """Action: send a signal to the process group of a worker."""

    rank: int
    number: int


class SignalProcess(NamedTuple):
    """Action: send a signal to one process only, without its children, which have inherited its signal handlers."""

    process: Process
    number: int


class FindHandlers(NamedTuple):
    """Action: find out which of `processes` are alive, and which of these would be killed by the checkpoint signal
    because they have no handler for it; then call `HostJob.save`."""

    processes: Mapping[int, Process]
    number: int
    saves: int
    """Number of times, with this one, that the ranks of all hosts were asked to save a checkpoint; 0 if only those of
    this host, or of their islands, are."""


class GatherStacks(NamedTuple):
    """Action: collect the stack traces of these ranks for the launcher."""

    number: int
    ranks: Sequence[int]


class DumpStacks(NamedTuple):
    """Action: have all workers write their stack traces before they are stopped; then call `HostJob.dumped`."""


class SendBeat(NamedTuple):
    """Action: measure memory and condition of the running workers, and send the launcher a heartbeat that contains them
    and the workers' steps."""

    steps: Mapping[int, tuple[int, float]]
    """For each rank, the last step that its process has made, and the seconds since that step."""
    pids: Mapping[int, int]
    """For each running rank, the id of the process that trains as this rank."""
    still: Collection[int]
    """Running ranks that have made no step for some time, so that the reason is looked up in the kernel."""


class TerminateAll(NamedTuple):
    """Action: send SIGTERM to all processes of the job on this host."""

    processes: Sequence[int]


class KillAll(NamedTuple):
    """Action: kill all processes of the job on this host."""

    processes: Sequence[int]
    spares_trackers: bool
    """Whether to spare Python's resource trackers, which clean up after killed processes and then end by themselves."""


class ResetStep(NamedTuple):
    """Action: reset the recorded step of this rank, because another process begins to train as the rank."""

    rank: int


class RemoveHalves(NamedTuple):
    """Action: remove incomplete files that an ended worker left in `folder`."""

    folder: str
    mark: str
    """Text with which the names of the incomplete files begin."""


class NoteWritten(NamedTuple):
    """Action: tell this host's workers, by a line in the job's list of written files, that a rank of another host has
    written a file in a shared folder."""

    rank: int
    size: int
    path: str


class HearHosts(NamedTuple):
    """Action: from now on, exchange heartbeats with the agents of `hosts`."""

    hosts: Sequence[Mapping[str, Any]]


class ProbeHosts(NamedTuple):
    """Action: try to reach other hosts at the addresses that the launcher's order lists."""

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
    | SendBeat
    | TerminateAll
    | KillAll
    | ResetStep
    | RemoveHalves
    | NoteWritten
    | HearHosts
    | ProbeHosts
)


class AgentOutbox(ActionQueue[AgentAction]):
    """The queue of the actions that the agent's decisions request."""

    def tell(self, kind: str, **facts: Any) -> None:
        """Queue an action that sends a frame to the launcher."""
        self.put(TellLauncher(Frame(kind, facts)))

    def answer(self, line: int, frame: Frame) -> None:
        self.put(AnswerLine(line, frame))
