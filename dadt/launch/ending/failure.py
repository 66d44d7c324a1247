"""Describes why a job failed: finds the failure that caused the others, and writes the text that the user sees."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dadt import errors
from dadt.control.condition import HELD
from dadt.launch.ending.record import ErrorRecord, printable, shortened

OWN_SETUP = re.compile(r"CUDA|NCCL|\bGPUs?\b")
GPU_MEMORY = re.compile(r"\b(?:CUDA|HIP) out of memory(?:.*?\b(GPU \d+))?", re.DOTALL)
MEMORY_TEXTS = ("out of memory", "can't allocate memory", "cannot allocate memory")
RANK = re.compile(r"\brank (\d+)\b")
EXIT_CODES = {kind.__name__: kind.exit_code for kind in (errors.ConfigError, errors.NotResumed, errors.StartTimeout)}
"""Exit codes with which `dadt run` ends, by the type of the exception that ended a worker. Other exceptions have no
exit code of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a worker process ended, as reported by its agent."""

    rank: int
    code: int
    """Exit code of the process; -n if signal n ended it."""
    time: float
    step: int
    """Optimizer steps that the worker had done; -1 if none."""
    peak_memory: int
    memory_limit: int
    memory_kills: int
    """Number of processes in the worker's cgroup that the kernel has killed for lack of memory since the agent began to
    start workers."""
    stopped: bool
    """Whether the worker ended after its agent had begun to stop all workers."""

    @property
    def killed_for_memory(self) -> bool:
        return self.code == -signal.SIGKILL and self.memory_kills > 0

    @property
    def text(self) -> str:
        """Words that describe the end and continue a sentence, as in "rank 2 has exited with code 1"."""
        if self.stopped and self.code < 0:
            return "was ended with the job"
        if self.killed_for_memory:
            return "was killed by the kernel for lack of memory"
        if self.code < 0:
            return f"was killed by signal {-self.code} ({signal_name(-self.code)})"
        return f"has exited with code {self.code}"


@dataclass(frozen=True, slots=True)
class Blame:
    """A cause of failure that no worker has reported. `cause` says what happened. `verdict` says it in a few words that
    follow "worker N failed", or in a complete sentence if no worker is to blame."""

    verdict: str
    cause: str

    @classmethod
    def of_early(cls, ending: Ending) -> Blame:
        """Return the blame for a worker that ended successfully while other workers still needed it."""
        code = "" if ending.stopped else " with exit code 0"
        cause = f"its script ended{code} after {steps_text(ending.step)}, while others went on"
        return cls(f"ended too early{',' if code else ''}{code}", cause)

    @classmethod
    def of_held(cls, condition: str) -> Blame:
        """Return the blame for a worker that could not continue. condition: why it could not, a key of
        condition.HELD."""
        return cls(condition, f"{HELD[condition]}, and the others waited for it")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The cause of a job's failure, with the facts that are shown to the user."""

    ending: Ending
    record: ErrorRecord | None
    seconds: float
    """Seconds from the start of the workers to the failure."""
    pid: int
    host: str
    log: Path
    stopped: Sequence[int] = ()
    """Other ranks, which were stopped because of this failure."""
    stacks: Sequence[Path] = ()
    """Files with the stack traces of the stopped ranks."""
    last_words: str = field(default="")
    """The last line that the worker wrote to stderr, shown if there is no record of an exception."""
    blame: Blame | None = None
    """A cause of the failure that no worker has reported; None if there is none. If `record` is set as well, this is
    what caused the recorded exception."""
    torch_env: bool = False
    """Whether the script received torchrun's variables (RANK and others), with which it may set up distributed training
    of its own."""
    alike: int = 0
    """Number of workers if all of them ended in this way after the same number of steps, so that no single one is to
    blame; else 0."""
    resume: str = ""
    """Command that resumes the job from its last snapshot; empty if there is none."""

    @property
    def exit_code(self) -> int:
        if self.blame is not None and self.record is None:
            return 1
        if self.record is not None and self.record.type in EXIT_CODES:
            return EXIT_CODES[self.record.type]
        code = self.ending.code
        if self.ending.stopped and self.record is not None:
            # The worker failed by its own exception, but exited so slowly that it was stopped, so its exit code does
            # not show the failure.
            return 1
        return code if code >= 0 else 128 - code

    @property
    def step(self) -> int | None:
        """The training step in which the worker failed; None if it had made no step."""
        if self.record is not None and self.record.step is not None:
            return self.record.step
        return self.ending.step if self.ending.step >= 0 else None

    @property
    def out_of_memory(self) -> bool:
        """Whether the worker failed because its host's or its GPU's memory was full."""
        return self.ending.killed_for_memory or (self.record is not None and _is_memory_error(self.record))

    def says(self, kind: type[errors.DadtError]) -> bool:
        return self.record is not None and self.record.type == kind.__name__

    def lines(self) -> list[str]:
        if self.record is not None and self.record.type in EXIT_CODES:
            return [self.record.message]  # the exception's message says everything, and this worker is not to blame
        # If there is a blame and a record, the exception was raised by a rank that only waited for the one to blame.
        whole = self.blame is not None and self.record is not None
        who = f"all {self.alike} workers" if self.alike else f"worker {self.ending.rank}"
        head = self._verdict() if whole else f"{who} failed ({self._verdict()})"
        head += f" after {self.seconds:.1f} s"
        step = self.step
        if step is not None:
            head += f", at step {step}"
        if self.stopped and not self.alike:
            head += f"; {_workers(self.stopped)} stopped"
        host = self.host or "this host"
        lines = [head, f"  host    {host}, pid {self.pid}, log {self.log}", f"  cause   {self._cause()}"]
        if self.record is not None and self.record.frames:
            frame = self.record.frames[-1]
            place = f'    File "{_as_typed(frame["file"])}", line {frame["line"]}'
            lines.append(place + (f", in {frame['function']}" if frame.get("function") else ""))
            if frame.get("text"):
                lines.append(f"      {frame['text']}")
        if self.record is not None:
            lines += self.record.lines_around()
        if self._sets_up_its_own():
            lines.append(
                "  hint    a script that finds RANK may set up training on GPUs by itself; --no-torch-env hides RANK"
            )
        if self.record is not None and self.record.unseen:
            kept = "what this rank wrote there was kept apart from the files of the first, where only Python finds it"
            lines.append(f"  hint    {printable(self.record.unseen)}: {kept}; --files all lets all ranks write")
        if self.ending.memory_limit:  # else its agent has not told
            lines.append(f"  memory  {self._memory()}")
        if self.stacks:
            lines.append(f"  stacks  {', '.join(map(str, self.stacks))}: where the others were")
        if self.resume:
            lines.append(f"  resume  {self.resume}")
        return lines

    def _sets_up_its_own(self) -> bool:
        record = self.record
        if record is None or not self.torch_env or self.step or _is_memory_error(record):
            return False
        return OWN_SETUP.search(record.text) is not None

    def _verdict(self) -> str:
        if self.blame is not None:
            return self.blame.verdict
        if self.ending.stopped and self.record is not None:
            # the worker had raised an exception, but was stopped before it exited
            return f"exit code {self.exit_code}"
        if self.ending.code < 0:
            return f"killed by signal {-self.ending.code}, {signal_name(-self.ending.code)}"
        return f"exit code {self.ending.code}"

    def _cause(self) -> str:
        if self.blame is not None:
            return self.blame.cause
        if self.record is not None:
            where = f" (in thread {self.record.thread})" if self.record.thread else ""
            return "\n          ".join(shortened(self.record.reason)) + where
        if self.ending.killed_for_memory:
            return "killed by the kernel for lack of memory"
        if -self.ending.code in (signal.SIGUSR1, signal.SIGUSR2):
            name = signal_name(-self.ending.code)
            return f"{name}, for which the script has no handler; dadt run passes it on (--forward-signals)"
        if self.ending.code < 0:
            return f"signal {-self.ending.code} ({signal_name(-self.ending.code)}), not sent by dadt"
        words = f"; its last words: {self.last_words}" if self.last_words else ""
        return f"{'each' if self.alike else 'it'} exited with code {self.ending.code}{words}"

    def _memory(self) -> str:
        ending = self.ending
        text = f"peak {size(ending.peak_memory)} (limit {size(ending.memory_limit)}): "
        if ending.killed_for_memory:
            return text + "killed by the kernel for lack of memory"
        if self.record is not None and (found := GPU_MEMORY.search(self.record.text)):
            return text + f"the memory of {found[1] or 'the GPU'} ran out, not the host's"
        if self.record is not None and _is_memory_error(self.record):
            return text + "the exception says that memory ran out"
        return text + "not out of memory"


def find_cause(
    endings: Sequence[Ending], records: Mapping[int, ErrorRecord], left: Sequence[int] = ()
) -> tuple[Ending, ErrorRecord | None] | None:
    """Return the earliest failure that was caused neither by another failure nor by stopping the job; None if nothing
    failed.

    The time of a failure is when its exception was raised, or else when the process exited. If every failure was caused
    by another rank, returns the first rank whose script ended successfully before the others', or else the earliest
    failure. left: ranks whose scripts ended while others continued, in the order of their ends.
    """

    def failed(ending: Ending) -> bool:
        record = records.get(ending.rank)
        if ending.stopped:
            return record is not None and not record.thread
        return ending.code != 0

    def order(ending: Ending) -> tuple[bool, float]:
        record = records.get(ending.rank)
        killed = ending.code == -signal.SIGKILL and not ending.stopped and record is not None and record.secondary
        if record is None or record.thread or killed:
            # An exception in another thread need not have ended the process, and one that another rank's failure has
            # caused has not ended a process that was killed: the time of the exit counts instead.
            return False, ending.time
        return record.secondary, record.time or ending.time

    def awaits(rank: int, other: int) -> bool:
        """Return whether a rank has waited for another one at the start, without success."""
        record = records.get(rank)
        if record is None or record.type != errors.StartTimeout.__name__:
            return False
        return str(other) in RANK.findall(record.message)

    def tells_of_another(ending: Ending) -> bool:
        record = records.get(ending.rank)
        if record is not None and record.tells_of_peer:
            return True
        if (
            record is not None
            and record.type == errors.StartTimeout.__name__
            and errors.StartTimeout.gone in record.message
        ):
            named = {int(rank) for rank in RANK.findall(record.message)}
            return any(each.rank in named and failed(each) for each in endings)
        lost = record is not None and record.type == errors.PeerLost.__name__
        peer = RANK.search(record.message) if record is not None and lost else None
        if peer is None or awaits(int(peer[1]), ending.rank):
            return False
        return any(each.rank == int(peer[1]) and failed(each) for each in endings)

    first = min(filter(failed, endings), key=order, default=None)
    if first is None:
        return None
    if (record := records.get(first.rank)) is not None and record.type == errors.StartTimeout.__name__:
        # StartTimeout means that this rank waited for another one, so the earliest failure of any kind is the cause.
        # Failures that tell of the end of another rank come last, as do those that name a rank which has failed as
        # well, since the clock of a host stands still while the host is paused.
        first = min(filter(failed, endings), key=lambda ending: (tells_of_another(ending), order(ending)[1]))
    record = records.get(first.rank)
    if record is not None and record.secondary and first.rank not in left:
        of = {ending.rank: ending for ending in endings}
        # A rank in `left` that exited with an error code has failed by itself, so it did not merely end too early.
        ended = [of[rank] for rank in left if rank in of and (of[rank].code == 0 or of[rank].stopped)]
        early = [ending for ending in ended if ending.step <= first.step]
        if early:
            return early[0], None
    return first, record


def last_line(tail: bytes) -> str:
    """Return the last line that the script printed to stderr, without DADT's own lines about the end of the rank."""
    lines = [line.strip() for line in tail.decode(errors="replace").splitlines()]
    lines = [line for line in lines if any(map(str.isalnum, line)) and not line.startswith("dadt: ")]
    return printable(lines[-1][:200]) if lines else ""


def steps_text(step: int) -> str:
    """Return the number of optimizer steps as text, such as "1 step" or "20 steps"; -1 means none."""
    return "1 step" if step == 1 else f"{max(0, step)} steps"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"


def size(count: int) -> str:
    """Return a number of bytes as text, such as 850 MiB, 1.2 GiB or 24 GiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min((max(count, 1).bit_length() - 1) // 10, len(units) - 1)
    value = count / 1024**power
    return f"{value:.1f} {units[power]}" if value < 10 and power else f"{value:.0f} {units[power]}"


def _as_typed(file: str) -> str:
    """Return the script's path relative to the current folder, as the user has probably typed it, since Python may have
    made it absolute."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):  # the file is outside the current folder, or the current folder was deleted
        return file


def _is_memory_error(record: ErrorRecord) -> bool:
    text = record.text.lower()
    return record.type == "MemoryError" or any(words in text for words in MEMORY_TEXTS)


def _workers(ranks: Sequence[int]) -> str:
    if len(ranks) > 4:
        return f"{len(ranks)} other workers were"
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"worker {names[0]} was"
    return f"workers {', '.join(names[:-1])} and {names[-1]} were"
