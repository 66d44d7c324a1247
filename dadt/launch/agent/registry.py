"""The processes of a host's workers, as they speak of themselves: which trains as which rank, and who waits for which
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
MOST_APPROACHES = 1024
"""Largest number of stored requests of workers that want to join, for processes that do not listen yet."""
KEPT = 64
"""Largest number of folders remembered per rank in which the rank may leave incomplete files."""


@dataclass(slots=True)
class Line:
    """One connection of a worker process."""

    number: int
    rank: int
    """Rank of the connected worker, known from the socket at which it connected."""
    process: Process
    """The process that connected; its pid is 0 if the kernel does not know it."""
    listens: bool = False
    """Whether the connected process wants to receive reports about other ranks."""


@dataclass(frozen=True, slots=True)
class Saying:
    """A frame that a process has sent on its line."""

    line: Line
    frame: Frame
    process: Process
    """The one that the frame is about, which is that of the line, if the kernel knows it."""
    now: float
    owner_lives: bool = False
    """Whether the process that trains as this rank still runs."""


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
    """Whether the rank waits for a rank of another host, which writes for this host too, instead of local rank 0."""


class WorkerRegistry:
    """Answers questions of workers that one host can answer, and forwards all others to the launcher with the number of
    their connection."""

    def __init__(
        self, folder: Path, ranks: Mapping[int, int], secret: bytes, checkpoint_signal: int, outbox: AgentOutbox
    ) -> None:
        """folder: of the job on this host. ranks: rank to local rank of this host's workers. secret: by which the
        workers of the job prove to each other that they belong to it. checkpoint_signal: the number of the signal by
        which scripts are asked to save; 0: there is none."""
        self._folder = folder
        self._ranks = ranks
        self._secret = secret
        self._checkpoint_signal = checkpoint_signal
        self._outbox = outbox
        self._told_to_save = 0
        """How often all ranks of the job were asked to save."""
        self.lines: dict[int, Line] = {}
        self.claims: dict[int, Process] = {}
        """Rank to the process that trains as it."""
        self.dumps: dict[Process, tuple[int, int, Path]] = {}
        """Process to its rank, its signal, and the file to which it then writes its stacks."""
        self._written: dict[int, list[tuple[str, str]]] = {}
        """Rank to the newest folders in which it writes files, and how their names begin before they are whole."""
        self._saves: dict[str, int] = {}
        """Path to how many times local rank 0 has written it."""
        self._numbered: set[int] = set()
        """The numbers of local rank 0's saves that are done."""
        self._far: set[int] = set()
        """The numbers of the saves of the rank of another host that writes for this one, too."""
        self._waits: list[SaveWait] = []
        self.first = 0
        """Local rank of the first one, which writes files for good."""
        self._first_step = -1
        self._first_ended = False
        """Whether it has ended well, so that nobody writes files any more. After another end the job ends, or the next
        one takes its place."""
        self._regrouped: Frame | None = None
        """The newest frame that says which ranks train now; None before the first."""
        self._approaches: deque[Frame] = deque(maxlen=MOST_APPROACHES)
        """Questions of new workers since that frame, for processes that begin to listen later."""
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
        """The kinds of frames that concern this host; all others of workers are only forwarded."""

    def connected(self, line: Line) -> None:
        self.lines[line.number] = line

    def hear(self, saying: Saying) -> None:
        """A worker's process has sent a frame. Raises DadtError for one that it may not send."""
        self.routes.get(saying.frame.kind, self._forward)(saying)

    def tell(self, frame: Frame) -> None:
        """Send a frame to every process that listens; which ranks train now also to those that will."""
        if frame.kind == "approach":
            self._approaches.append(frame)
        if frame.kind == "regroup":
            self._regrouped = frame
            self._approaches.clear()  # those that are still open follow
            for rank in self._ranks.keys() & set(frame["firsts"]):
                self.first, self._first_ended = self._ranks[rank], False
        for line in [line for line in self.lines.values() if line.listens]:
            self._outbox.answer(line.number, frame)

    def wrote(self, frame: Frame, now: float) -> None:
        """A rank of another host has written a file, of which all that ask here are to know."""
        if "number" in frame.header:
            self._far.add(frame["number"])
            self._saves[frame["path"]] = max(frame["count"], self._saves.get(frame["path"], 0))
            self._settle(now)
        else:
            self._outbox.put(NoteWritten(frame["rank"], frame["size"], frame["path"]))

    def tell_to_save(self, ranks: Collection[int], patience: float) -> set[int]:
        """Ask the processes that train as these ranks to save. Returns the ranks that were asked: the others do not
        listen."""
        self._told_to_save += patience > 0
        return self.tell_training(ranks, Frame("save", {"patience": patience}))

    def tell_training(self, ranks: Collection[int], frame: Frame) -> set[int]:
        """Send a frame to the processes that train as these ranks. Returns the ranks to which it was sent."""
        lines = [line for line in self.lines.values() if line.listens and line.rank in ranks]
        told = [line for line in lines if line.rank in self.claims and self.claims[line.rank].pid == line.process.pid]
        for line in told:
            self._outbox.answer(line.number, frame)
        return {line.rank for line in told}

    def hung_up(self, number: int) -> None:
        """A line was closed by either side."""
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
        """Answer the waits that are over. first_step: the step of the rank that writes files for good."""
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
        """The answer to a rank that waits for a file; None as long as it has to wait."""
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
            header["pid"] = saying.process.pid  # the kernel's word counts, as the pid may be signalled
        self._outbox.put(TellLauncher(Frame(frame.kind, header, frame.body)))

    def _failed(self, saying: Saying) -> None:
        self.failed.add(saying.line.rank)
        self._forward(saying)

    def _hello(self, saying: Saying) -> None:
        """Handle a process that has imported torch. If it had begun to train before, it has replaced itself (exec), and
        its state is reset."""
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
        for frame in [*filter(None, [self._regrouped]), *self._approaches]:
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
