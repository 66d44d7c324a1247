"""The agent's end of the control connections: which process trains as which rank, and who waits for which file."""

from __future__ import annotations

import re
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dadt.control import written_files
from dadt.control.accept import Entrance, peer_of
from dadt.control.frame import Frame, Link
from dadt.control.heartbeat import Heartbeat
from dadt.control.schema import Speaker
from dadt.errors import DadtError
from dadt.launch.agent.dump import Inquiry
from dadt.launch.agent.worker import Worker
from dadt.launch.processes import Process

LOCAL = ("stacks", "writes", "saved", "await_save", "listen")
"""Kinds that concern this host only; all others are forwarded to the launcher."""
SHIMS = ("shim", "spawned", "unspawned", "ended")
"""Kinds that shims send, which speak of another process than their own."""
STACKS_FILE = re.compile(r"stacks-[0-9]+")
MOST_APPROACHES = 1024
"""Most questions of new workers that are kept for processes that do not listen yet."""
KEPT = 64
"""Folders of each rank in which files may be left that are not whole."""
UNSENT_LIMIT = 64 << 20
"""Most bytes of answers that a process may leave unread."""


@dataclass(slots=True)
class Line:
    """One connection of a worker process."""

    number: int
    rank: int
    """The rank it speaks for, known by the socket at which it connected."""
    pid: int
    """The process that connected; 0 if the kernel does not know."""
    link: Link
    socket: socket.socket
    entrance: Entrance
    listens: bool = False
    """Whether its process wants to hear of other ranks' ends."""


@dataclass(slots=True)
class SaveWait:
    """A rank that waits until local rank 0 has written a file."""

    line: Line
    path: str
    count: int
    number: int
    step: int
    deadline: float
    far: bool
    """Whether it waits for a rank of another host, which writes for this one, too, instead of local rank 0."""


@dataclass(slots=True)
class WorkerRegistry:
    """Answers the questions that one host can answer, and forwards the rest with the number of their line."""

    path: Path
    ranks: Mapping[int, int]
    """Rank to local rank of this host's workers."""
    pulse: Heartbeat
    forward: Callable[[Frame], None]
    speaker: Speaker
    """The frames that workers may send."""
    secret: bytes
    """The job's secret, by which its workers prove to each other that they belong to it."""
    checkpoint_signal: int
    """The number of the signal by which scripts are asked to save; 0: there is none."""
    told_to_save: int = 0
    """How often all ranks of the job were asked to save."""
    lines: dict[int, Line] = field(default_factory=dict)
    claims: dict[int, Process] = field(default_factory=dict)
    """Rank to the process that trains as it."""
    dumps: dict[Process, tuple[int, int, Path]] = field(default_factory=dict)
    """Process to its rank, its signal, and the file to which it then writes its stacks."""
    written: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    """Rank to the newest folders in which it writes files, and how their names begin before they are whole."""
    saves: dict[str, int] = field(default_factory=dict)
    """Path to how many times local rank 0 has written it."""
    numbered: set[int] = field(default_factory=set)
    """The numbers of local rank 0's saves that are done."""
    far: set[int] = field(default_factory=set)
    """The numbers of the saves of the rank of another host that writes for this one, too."""
    waits: list[SaveWait] = field(default_factory=list)
    first: int = 0
    """Local rank of the first one, which writes files for good."""
    first_ended: bool = False
    """Whether it has ended well, so that nobody writes files any more. After another end the job ends, or the next one
    takes its place."""
    inquiries: list[Inquiry] = field(default_factory=list)
    """Stacks for which the launcher waits."""
    regrouped: Frame | None = None
    """The newest frame that says which ranks train now; None before the first."""
    approaches: deque[Frame] = field(default_factory=lambda: deque(maxlen=MOST_APPROACHES))
    """Questions of new workers since that frame, for processes that begin to listen later."""
    failed: set[int] = field(default_factory=set)
    """Ranks that have reported an exception."""
    _numbered: int = 0

    def accept(self, rank: int, entrance: Entrance) -> Line | None:
        connection = entrance.accept()
        if connection is None:
            return None
        self._numbered += 1
        link = Link(connection.fileno(), connection.fileno(), self.speaker)
        line = Line(self._numbered, rank, peer_of(connection).pid, link, connection, entrance)
        self.lines[line.number] = line
        return line

    def receive(self, line: Line) -> None:
        """Handle the frames that have come, and send what did not fit before. Raises EOFError when the worker has hung
        up, and DadtError for a frame that it may not send."""
        try:
            line.link.flush()
        except BrokenPipeError:
            raise EOFError from None
        for frame in line.link.receive():
            if frame["rank"] != line.rank:
                raise DadtError(f"{frame.kind!r} for rank {frame['rank']} came from a process of rank {line.rank}")
            line.entrance.settle(line.socket)
            if frame.kind == "failed":
                self.failed.add(line.rank)
            if "pid" in frame.header and frame.kind not in SHIMS and line.pid > 1:
                frame.header["pid"] = line.pid  # the kernel's word counts, as the pid may be signalled
            if frame.kind == "hello":
                self._greet(line)
            if frame.kind == "claim":
                self._claim(line, frame)
            elif frame.kind in LOCAL:
                getattr(self, f"_{frame.kind}")(line, frame)
            else:
                self.forward(Frame(frame.kind, {**frame.header, "line": line.number}, frame.body))

    def answer(self, number: int, frame: Frame) -> None:
        """Send a frame on the line with that number, if it is still open."""
        line = self.lines.get(number)
        if line is None:
            return
        try:
            line.link.send(frame)
        except BrokenPipeError:
            # It died while it waited, or stopped listening. What it has sent before is still read.
            line.link.unsent.clear()
            line.listens = False
        if len(line.link.unsent) > UNSENT_LIMIT + len(frame.body):
            line.link.unsent.clear()
            line.socket.shutdown(socket.SHUT_RDWR)  # it keeps asking without reading

    def tell(self, frame: Frame) -> None:
        """Send a frame to every process that listens; which ranks train now also to those that will. What a rank of
        another host has written is noted for all that ask."""
        if frame.kind == "wrote":
            self._note(frame)
            return
        if frame.kind == "approach":
            self.approaches.append(frame)
        if frame.kind == "regroup":
            self.regrouped = frame
            self.approaches.clear()  # those that are still open follow
            for rank in self.ranks.keys() & set(frame["firsts"]):
                self.first, self.first_ended = self.ranks[rank], False
        for line in [line for line in self.lines.values() if line.listens]:
            self.answer(line.number, frame)

    def _note(self, frame: Frame) -> None:
        if "number" in frame.header:
            self.far.add(frame["number"])
            self.saves[frame["path"]] = max(frame["count"], self.saves.get(frame["path"], 0))
            self.settle_saves()
        else:
            written_files.add(self.path.parent, frame["rank"], frame["size"], frame["path"])

    def tell_to_save(self, ranks: Collection[int], patience: float) -> set[int]:
        """Ask the processes that train as these ranks to save. Returns the ranks that were asked: the others do not
        listen."""
        self.told_to_save += patience > 0
        return self.tell_training(ranks, Frame("save", {"patience": patience}))

    def tell_training(self, ranks: Collection[int], frame: Frame) -> set[int]:
        """Send a frame to the processes that train as these ranks. Returns the ranks to which it was sent."""
        lines = [line for line in self.lines.values() if line.listens and line.rank in ranks]
        told = [line for line in lines if line.rank in self.claims and self.claims[line.rank].pid == line.pid]
        for line in told:
            self.answer(line.number, frame)
        return {line.rank for line in told if line.listens}

    def hang_up(self, line: Line) -> None:
        self.lines.pop(line.number, None)
        self.waits = [wait for wait in self.waits if wait.line is not line]
        line.entrance.settle(line.socket)
        line.socket.close()

    def ended(self, rank: int, code: int) -> None:
        """A worker has exited, and writes no file to its end any more."""
        if self.ranks[rank] == self.first:
            self.first_ended = code == 0
        for folder, mark in self.written.pop(rank, []):
            with suppress(OSError):  # the file system may be what has failed
                for half in Path(folder).glob(f"{mark}*"):
                    shutil.rmtree(half, ignore_errors=True)

    @property
    def is_waited_for(self) -> bool:
        return bool(self.waits or self.inquiries)

    def pid_of(self, worker: Worker) -> int:
        """The process that trains as the worker's rank; the worker itself before one does."""
        return self.claims[worker.rank].pid if worker.rank in self.claims else worker.pid

    def inquire(self, number: int, ranks: list[int]) -> None:
        """Begin to collect the stacks of these ranks of this host for the launcher."""
        self.inquiries.append(Inquiry(number, ranks, self.dumps))

    def settle(self) -> None:
        """Answer the waits and inquiries that are complete."""
        self.settle_saves()
        for inquiry in list(self.inquiries):
            if answers := inquiry.advance():
                self.inquiries.remove(inquiry)
                for answer in answers:
                    self.forward(answer)

    def settle_saves(self) -> None:
        now = time.monotonic()
        step, _ = self.pulse.read(self.first)
        waits, self.waits = self.waits, []
        for wait in waits:
            if self.saves.get(wait.path, 0) >= wait.count:
                self.answer(wait.line.number, Frame("saved", {"verdict": "there"}))
            elif wait.far and wait.number not in self.far and now < wait.deadline:
                self.waits.append(wait)
            elif wait.far:
                self.answer(wait.line.number, Frame("saved", {"verdict": "write"}))
            elif self.ranks[wait.line.rank] == self.first:
                self.answer(wait.line.number, Frame("saved", {"verdict": "yours"}))
            elif wait.number in self.numbered or self.first_ended or step > wait.step or now >= wait.deadline:
                self.answer(wait.line.number, Frame("saved", {"verdict": "write"}))
            else:
                self.waits.append(wait)

    def _greet(self, line: Line) -> None:
        """A process has imported torch: once more, where it had begun to train, and has replaced itself since."""
        if self.claims.get(line.rank) == Process.of(line.pid):
            self.pulse.write(self.ranks[line.rank], -1)
            if self.ranks[line.rank] == self.first:
                self.saves.clear()
                self.numbered.clear()

    def _claim(self, line: Line, frame: Frame) -> None:
        rank, process = frame["rank"], Process.of(frame["pid"])
        owner = self.claims.get(rank, process)
        if owner != process and owner.is_alive:
            text = (
                f"rank {rank} is already claimed by pid {owner.pid}: of the processes of one worker only one may train"
            )
            self.answer(line.number, Frame("error", {"type": "DadtError", "message": text}))
            return
        self.claims[rank] = process
        told = {"signal": self.checkpoint_signal, "saves": self.told_to_save}
        self.forward(Frame(frame.kind, {**frame.header, "line": line.number}))
        self.answer(line.number, Frame("claimed", told, self.secret))

    def _stacks(self, line: Line, frame: Frame) -> None:
        path = Path(frame["path"])
        if path.parent != self.path.parent or not STACKS_FILE.fullmatch(path.name):
            raise DadtError(f"{path} is no file for stacks in the folder of the job")
        self.dumps[Process.of(frame["pid"])] = (line.rank, frame["signal"], path)

    def _listen(self, line: Line, frame: Frame) -> None:
        line.listens = True
        for frame in [*filter(None, [self.regrouped]), *self.approaches]:
            self.answer(line.number, frame)

    def _writes(self, line: Line, frame: Frame) -> None:
        where = frame["path"], frame["mark"]
        others = [each for each in self.written.get(line.rank, []) if each != where]
        self.written[line.rank] = [*others[1 - KEPT :], where]

    def _saved(self, line: Line, frame: Frame) -> None:
        self.numbered.add(frame["number"])
        self.saves[frame["path"]] = max(frame["count"], self.saves.get(frame["path"], 0))
        self.settle_saves()

    def _await_save(self, line: Line, frame: Frame) -> None:
        deadline = time.monotonic() + frame["timeout"]
        asked = frame["path"], frame["count"], frame["number"], frame["step"]
        self.waits.append(SaveWait(line, *asked, deadline, frame.get("far", False)))
        self.settle_saves()
