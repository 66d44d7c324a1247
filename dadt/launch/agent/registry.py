"""Records what a host's worker processes report: which process trains as which rank, and which rank waits for which
file."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from dadt.control.frame import Frame
from dadt.errors import DadtError
from dadt.launch.agent.actions import AgentOutbox, NoteWritten, RemoveHalves, ResetStep, TellLauncher
from dadt.launch.ending.processes import Process

STACKS_FILE = re.compile(r"stacks-[0-9]+")
MOST_LASTING = 1024
"""Largest number of requests to join and proposals that are stored for processes which do not receive reports yet."""
KEPT = 64
"""Largest number of folders with incomplete files that are remembered for a rank."""


@dataclass(slots=True)
class Line:
    """The connection of one worker process to the agent."""

    number: int
    rank: int
    """Rank of the connected worker, known from the socket at which it connected."""
    process: Process
    """Process that connected; its pid is 0 if the kernel does not report it."""
    listens: bool = False
    """Whether the connected process wants to receive reports about other ranks."""


@dataclass(frozen=True, slots=True)
class Saying:
    """A frame that a worker's process has sent on its connection."""

    line: Line
    frame: Frame
    process: Process
    """Process that the frame is about. This is the connected process, unless the frame comes from a shim or the kernel
    does not report the connected process."""
    now: float
    owner_lives: bool = False
    """For a frame `claim`: whether the process that already trains as this rank still runs."""


@dataclass(slots=True)
class SaveWait:
    """A rank that waits until local rank 0 (or, with `far`, a rank of another host) has written a file."""

    line: Line
    path: str
    count: int
    number: int
    step: int
    deadline: float
    far: bool
    """Whether the rank waits for a rank of another host, which writes files for this host, too, instead of for local
    rank 0."""


class WorkerRegistry:
    """Answers those questions of workers that concern one host only, and forwards all others to the launcher, together
    with the number of the worker's connection."""

    def __init__(
        self,
        folder: Path,
        ranks: Mapping[int, int],
        secret: bytes,
        checkpoint_signal: int,
        saves: int,
        outbox: AgentOutbox,
    ) -> None:
        """folder: folder of the job on this host. ranks: local rank of each rank on this host. secret: the secret by
        which the job's workers prove to each other that they belong to the job. checkpoint_signal: number of the signal
        that asks scripts to save; 0: none. saves: number of times that this signal has been sent to all ranks."""
        self._folder = folder
        self._ranks = ranks
        self._secret = secret
        self._checkpoint_signal = checkpoint_signal
        self._outbox = outbox
        self._told_to_save = saves
        """Number of the latest order to save, to all ranks of the job, that workers were told of. A process that begins
        to train between an order and this is told of the order like the others."""
        self.lines: dict[int, Line] = {}
        self.claims: dict[int, Process] = {}
        """For each rank, the process that has claimed to train as this rank."""
        self.dumps: dict[Process, tuple[int, int, Path]] = {}
        """For each process: its rank, the signal on which it writes its stack traces, and the file to which it writes
        them."""
        self._written: dict[int, list[tuple[str, str]]] = {}
        """For each rank, the latest folders in which it writes files, each with the text that begins the names of files
        it has not completed yet."""
        self._saves: dict[str, int] = {}
        """For each path, the number of times that the file was saved by local rank 0, or by a rank of another host that
        writes for this host, too."""
        self._numbered: set[int] = set()
        """Numbers of the saves that local rank 0 has finished; it counts its saves of all files."""
        self._far: set[int] = set()
        """Numbers of the saves that a rank of another host, which writes files for this host, too, has finished."""
        self._waits: list[SaveWait] = []
        self.first = 0
        """Local rank of the rank that writes the real files of this host; other ranks write private copies."""
        self._first_step = -1
        self._first_ended = False
        """Whether the rank that writes this host's real files ended with exit code 0, so that no rank writes them any
        more. If it fails instead, the job ends or the next rank takes over."""
        self._regrouped: Frame | None = None
        """The latest `regroup` frame, which says which ranks train now; None before the first."""
        self._lasting: deque[Frame] = deque(maxlen=MOST_LASTING)
        """Requests of replacement workers to join, and proposals of ranks, since the latest `regroup` frame, stored for
        processes that begin to receive reports later."""
        self.failed: set[int] = set()
        """Ranks that have reported an exception."""
        self.routes: Mapping[str, Callable[[Saying], None]] = {
            "hello": self._hello,
            "claim": self._claim,
            "failed": self._failed,
            "stacks": self._stacks,
            "listen": self._listen,
            "writes": self._writes,
            "saved": self._saved,
            "await_save": self._await_save,
        }
        """Handlers for the kinds of workers' frames that concern this host. All other frames are only forwarded to the
        launcher."""

    def connected(self, line: Line) -> None:
        self.lines[line.number] = line

    def hear(self, saying: Saying) -> None:
        """Handle a frame that a worker's process has sent. Raises DadtError if the process may not send it."""
        self.routes.get(saying.frame.kind, self._forward)(saying)

    def tell(self, frame: Frame) -> None:
        """Send a frame to every process that receives reports about other ranks. Frames of the kinds `regroup`,
        `approach` and `proposal` are also stored for processes that begin to receive reports later."""
        if frame.kind in ("approach", "proposal"):
            self._lasting.append(frame)
        if frame.kind == "regroup":
            self._regrouped = frame
            self._lasting.clear()  # after a regroup, the launcher repeats requests to join that are still unanswered
            for rank in self._ranks.keys() & set(frame["firsts"]):
                self.first, self._first_ended = self._ranks[rank], False
        for line in [line for line in self.lines.values() if line.listens]:
            self._outbox.answer(line.number, frame)

    def wrote(self, frame: Frame, now: float) -> None:
        """Handle the report that a rank of another host has written a file in a shared folder: answer the ranks that
        wait for the file, or pass the report to this host's workers."""
        if "number" in frame.header:
            self._far.add(frame["number"])
            self._saves[frame["path"]] = max(frame["count"], self._saves.get(frame["path"], 0))
            self._settle(now)
        else:
            self._outbox.put(NoteWritten(frame["rank"], frame["size"], frame["path"]))

    def tell_to_save(self, ranks: Collection[int], patience: float, count: int) -> set[int]:
        """Ask the processes that train as these ranks to save. count: number of times that all ranks of the job have
        been asked, with this one. Returns the ranks that were asked, which excludes those that do not receive
        reports."""
        self._told_to_save = max(self._told_to_save, count)
        return self.tell_training(ranks, Frame("save", {"patience": patience, "count": count}))

    def tell_training(self, ranks: Collection[int], frame: Frame) -> set[int]:
        """Send a frame to the processes that train as these ranks and that receive reports. Returns the ranks to which
        it was sent."""
        training = [line for line in self._training if line.rank in ranks]
        for line in training:
            self._outbox.answer(line.number, frame)
        return {line.rank for line in training}

    @property
    def training(self) -> set[int]:
        """The ranks that train and receive reports."""
        return {line.rank for line in self._training}

    @property
    def _training(self) -> list[Line]:
        listening = [line for line in self.lines.values() if line.listens and line.rank in self.claims]
        return [line for line in listening if self.claims[line.rank].pid == line.process.pid]

    def hung_up(self, number: int) -> None:
        """Forget a connection that was closed, and the questions that were asked on it."""
        self.lines.pop(number, None)
        self._waits = [wait for wait in self._waits if wait.line.number != number]

    def ended(self, rank: int, code: int) -> None:
        """Handle a worker's end: delete the incomplete files that it left behind."""
        if self._ranks[rank] == self.first:
            self._first_ended = code == 0
        for folder, mark in self._written.pop(rank, []):
            self._outbox.put(RemoveHalves(folder, mark))

    @property
    def is_waited_for(self) -> bool:
        return bool(self._waits)

    def settle(self, first_step: int, now: float) -> None:
        """Answer the ranks that need not wait for a file any more. first_step: last step of the rank that writes this
        host's real files."""
        self._first_step = first_step
        self._settle(now)

    def _settle(self, now: float) -> None:
        waits, self._waits = self._waits, []
        for wait in waits:
            if (verdict := self._verdict(wait, now)) is None:
                self._waits.append(wait)
            else:
                self._outbox.answer(wait.line.number, Frame("saved", {"verdict": verdict}))

    def _verdict(self, wait: SaveWait, now: float) -> str | None:
        """Return the answer to a rank that waits for a file; None if it must wait longer."""
        late = now >= wait.deadline
        if self._saves.get(wait.path, 0) >= wait.count:
            return "there"
        if wait.far:
            return "write" if late or wait.number in self._far else None
        if self._ranks[wait.line.rank] == self.first:
            return "yours"
        gone = wait.number in self._numbered or self._first_ended or self._first_step > wait.step
        return "write" if late or gone else None

    def _forward(self, saying: Saying) -> None:
        frame = saying.frame
        header = {**frame.header, "line": saying.line.number}
        if "pid" in header:
            # Use the pid that the kernel reports, not the one in the frame, since the process may be sent signals
            # later.
            header["pid"] = saying.process.pid
        self._outbox.put(TellLauncher(Frame(frame.kind, header, frame.body)))

    def _failed(self, saying: Saying) -> None:
        self.failed.add(saying.line.rank)
        self._forward(saying)

    def _hello(self, saying: Saying) -> None:
        """Handle the report of a process that it has imported torch. If the process was training already, it has
        replaced itself (exec), and the rank's state is reset."""
        rank = saying.line.rank
        if self.claims.get(rank) == saying.line.process:
            self._outbox.put(ResetStep(rank))
            if self._ranks[rank] == self.first:
                self._saves.clear()
                self._numbered.clear()
        self._forward(saying)

    def _claim(self, saying: Saying) -> None:
        rank, process = saying.line.rank, saying.process
        owner = self.claims.get(rank, process)
        if owner != process and saying.owner_lives:
            text = (
                f"rank {rank} is already claimed by pid {owner.pid}: of the processes of one worker only one may train"
            )
            self._outbox.answer(saying.line.number, Frame("error", {"type": "DadtError", "message": text}))
            return
        self.claims[rank] = process
        self._forward(saying)
        told = {"signal": self._checkpoint_signal, "saves": self._told_to_save}
        self._outbox.answer(saying.line.number, Frame("claimed", told, self._secret))

    def _stacks(self, saying: Saying) -> None:
        path = Path(saying.frame["path"])
        if path.parent != self._folder or not STACKS_FILE.fullmatch(path.name):
            raise DadtError(f"{path} is no file for stacks in the folder of the job")
        self.dumps[saying.process] = (saying.line.rank, saying.frame["signal"], path)

    def _listen(self, saying: Saying) -> None:
        saying.line.listens = True
        for frame in [*filter(None, [self._regrouped]), *self._lasting]:
            self._outbox.answer(saying.line.number, frame)

    def _writes(self, saying: Saying) -> None:
        where = saying.frame["path"], saying.frame["mark"]
        others = [each for each in self._written.get(saying.line.rank, []) if each != where]
        self._written[saying.line.rank] = [*others[1 - KEPT :], where]

    def _saved(self, saying: Saying) -> None:
        frame = saying.frame
        self._numbered.add(frame["number"])
        self._saves[frame["path"]] = max(frame["count"], self._saves.get(frame["path"], 0))
        self._settle(saying.now)

    def _await_save(self, saying: Saying) -> None:
        frame = saying.frame
        asked = frame["path"], frame["count"], frame["number"], frame["step"]
        self._waits.append(SaveWait(saying.line, *asked, saying.now + frame["timeout"], frame.get("far", False)))
        self._settle(saying.now)
