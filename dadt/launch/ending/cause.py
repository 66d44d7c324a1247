"""Finds out what first caused a job's end, from everything that its agents and workers have reported."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from signal import SIGKILL

from dadt.errors import LaunchError, StartTimeout
from dadt.launch.actions import Event
from dadt.launch.ending.failure import Blame, Ending, Failure, find_cause, last_line
from dadt.launch.ending.record import ErrorRecord
from dadt.launch.hosts.slot import Slot
from dadt.launch.members.member import Member
from dadt.launch.monitor.log_files import log_path, stacks_path

TAIL_BYTES = 1 << 14
SAID_LETTERS = 1000
BEAT_SECONDS = 2.0
"""Seconds that may pass until the launcher learns of a step that a rank has made."""
LOSS_SECONDS = 1.0
"""Seconds that may pass until the launcher learns that an agent was lost. Other ranks may fail before that as a
consequence."""
UNCAUGHT = 1
"""Python's exit code after an uncaught exception."""


class Cause:
    """Collects facts about each rank's end and, once all ranks have ended, decides which one failed first."""

    def __init__(
        self,
        slots: Sequence[Slot],
        members: Sequence[Member],
        logs: Path,
        patience: float,
        silence: Callable[[float], Blame | None],
    ) -> None:
        """logs: folder of the ranks' logs. patience: minimum seconds for which ranks wait for a rank that cannot
        continue. silence: called with the time; returns the Blame if hosts do not receive each other's packets, else
        None."""
        self._slots = slots
        self._members = members
        self._logs = logs
        self._patience = patience
        self._tails = [b"" for _ in slots]
        """Last bytes that each rank wrote to stderr."""
        self._silence = silence
        self.endings: dict[int, Ending] = {}
        """How each rank's process ended, by rank; ranks that still run are missing."""
        self._records: dict[int, ErrorRecord] = {}
        self._left: list[int] = []
        """Ranks whose script ended while other ranks continued, in the order in which they ended."""
        self._said: dict[int, ErrorRecord] = {}
        """Text that each rank's script passed to `sys.exit`, by rank."""
        self._held: Member | None = None
        """The first rank that could not continue, for example because it was suspended, and for which another rank
        stopped waiting."""
        self._blame: Blame | None = None
        self._excused: set[int] = set()
        """Ranks that were lost while the others continued training without them."""
        self._given_up: set[int] = set()
        """Ranks for which all others had waited too long, as the launcher decided."""
        self._error = ""
        """Text that says why the first lost agent was lost, or why an agent could not start its workers; empty if
        neither happened."""
        self._told_to_end = ""
        """Text that says how something other than the launcher asked an agent to end, for the first such agent; empty
        if there is none."""
        self._gave_up_at = float("-inf")
        """Time, by the clock of `judge`, at which a rank stopped waiting for others while hosts did not receive each
        other's heartbeats."""
        self._lost_at = float("inf")
        """Time at which the first agent was lost, by the clock of `judge`; infinite if none was."""

    def complained(self, event: Event) -> None:
        """Record what a rank has written to stderr."""
        rank = event.frame["rank"]
        self._tails[rank] = (self._tails[rank] + event.frame.body)[-TAIL_BYTES:]

    def lose(self, text: str, at: float = float("inf")) -> None:
        """Record that an agent was lost, or could not start its workers. at: time of the loss by the clock of `judge`;
        infinite if unknown."""
        if not self._error or at < self._lost_at < float("inf"):
            self._error = text
        self._lost_at = min(self._lost_at, at)
        if self._held is None and at < self._gave_up_at + LOSS_SECONDS:
            # The rank stopped waiting because of this loss, not because hosts received no heartbeats from each other.
            self._blame = None

    def tell_to_end(self, text: str) -> None:
        """Record that an agent was asked to end by something other than the launcher. Clusters do so also after another
        host was lost, sometimes before the launcher notices the loss, so the loss of an agent takes precedence as the
        cause."""
        self._told_to_end = self._told_to_end or text

    def excuse(self, ranks: Collection[int]) -> None:
        """Record that the other ranks continue training without these ranks, whose exits are therefore no cause of the
        job's end."""
        self._excused.update(ranks)
        if self._held is not None and self._held.rank in ranks:
            self._held = self._blame = None

    def join(self, ranks: Collection[int]) -> None:
        """Record that new workers train in place of these ranks, and forget how the ranks' former workers ended."""
        for rank in ranks:
            self._excused.discard(rank)
            self._tails[rank] = b""
            for facts in (self.endings, self._records, self._said):
                facts.pop(rank, None)
            if rank in self._left:
                self._left.remove(rank)

    def leave(self, rank: int) -> None:
        """Record that a rank's script has ended. The exit code of its process is recorded later, by `end`."""
        if rank not in self._left:
            self._left.append(rank)

    def exits(self, event: Event) -> None:
        """Record that a rank's script has called `sys.exit` with a text. Whether this call ends the process is decided
        later, by `end`."""
        self._said[event.frame["rank"]] = ErrorRecord.of_exit(event.frame.header)

    def ending(self, event: Event) -> None:
        """Handle a rank's report that its script has ended."""
        self.leave(event.frame["rank"])

    def hold(self, member: Member) -> None:
        """Record that other ranks stopped waiting for this rank, because it cannot continue."""
        if self._held is None:
            self._held = member
            self._blame = Blame.of_held(member.condition)

    def give_up_silent(self, ranks: Collection[int]) -> None:
        """Record that all others had waited too long for these ranks: no silence between hosts is why they fail."""
        self._given_up |= set(ranks)

    def give_up(self, rank: int, record: ErrorRecord, now: float) -> None:
        """Record an exception that this rank has reported. The exception ends the rank's process unless it was raised
        in a thread other than the main one."""
        known = self._records.get(rank)
        # The main thread's exception ends the process, so it replaces another thread's. Among all others, the first
        # exception counts.
        if known is None or (known.thread and not record.thread):
            self._records[rank] = record
        # If another cause is known already, or the others train on without this rank, this failure is a consequence.
        explained = self._held is not None or self._error or self._told_to_end or rank in self._excused
        if record.secondary and record.type != "Mismatch" and not explained:
            awaited = [member for member in self._members if not (member.rank == rank or member.lost)]
            held = next((member for member in awaited if self._keeps_waiting(member, now)), None)
            if held is not None:
                self.hold(held)
            elif self._blame is None and self._given_up <= self._excused and (blame := self._silence(now)) is not None:
                self._blame, self._gave_up_at = blame, record.time

    def _keeps_waiting(self, member: Member, now: float) -> bool:
        """Return whether a rank has been unable to continue for so long that other ranks stop waiting for it."""
        return bool(member.held) and now - member.seen > self._patience - BEAT_SECONDS

    def end(self, ending: Ending) -> ErrorRecord | None:
        """Record a worker's exit. Returns the exception that ended the worker, from its report or from the traceback in
        its output; None if there is none."""
        self.endings[ending.rank] = ending
        if ending.code == 0 and not ending.stopped:
            self._records.pop(ending.rank, None)  # exit code 0 shows that the exception did not end the process
        elif ending.rank not in self._records and ending.code == UNCAUGHT and not ending.stopped:
            tail = self._tails[ending.rank]
            said = self._said.get(ending.rank)
            # When sys.exit(text) ends a process, Python prints the text to stderr, so the stored end of stderr must
            # contain the end of the text.
            if said is not None and said.message[-SAID_LETTERS:] in tail.decode(errors="replace"):
                record: ErrorRecord | None = said
            else:
                record = ErrorRecord.from_stderr(tail)
            if record is not None:
                self._records[ending.rank] = record
        return self._records.get(ending.rank)

    def judge(self, begun: float, stacks: Sequence[Path]) -> Failure | None:
        """Return the job's failure; None if the job ended well. begun: uptime of the launcher's host when the job
        began. stacks: files with the ranks' stack traces. Raises LaunchError if the job failed but no worker is the
        cause."""
        self._suppose_ends()
        if self._told_to_end and any(each.stopped and each.time < self._gave_up_at for each in self._ends):
            self._blame = None  # ranks gave up as workers had been ended, and not for the silence between hosts
        cause = self._find()
        known = self._excused | self.endings.keys()
        untold = [slot for slot in self._slots if slot.rank not in known]
        explained = bool(self._error or self._told_to_end or untold)
        if cause is not None and not (explained and self._is_consequence(*cause)) and not self._follows_end(*cause):
            return self._failure(*cause, begun, stacks)
        if self._error:
            raise LaunchError(self._error)
        # Of several, the rank is named that has shown no sign of life for the longest time.
        first = min(untold, key=lambda slot: self._members[slot.rank].acted, default=None)
        rank, host = (first.rank, first.host) if first is not None else (-1, "")
        if self._told_to_end:
            also = f"; it is not known how rank {rank} on {host} has ended: its agent has not told" if untold else ""
            raise LaunchError(self._told_to_end + also)
        if untold:
            where = f"{host}: " if host else ""
            raise LaunchError(f"{where}it is not known how rank {rank} has ended: its agent has not told")
        return None

    def _suppose_ends(self) -> None:
        """Add endings of ranks that have reported an exception of their own, but whose end no agent has reported."""
        for rank, record in self._records.items():
            if rank not in self.endings and not record.thread:
                step = record.step if record.step is not None else -1
                memory = {"peak_memory": 0, "memory_limit": 0, "memory_kills": 0}
                supposed = Ending(rank=rank, code=UNCAUGHT, time=record.time, step=step, stopped=True, **memory)
                if not self._is_consequence(supposed, record):
                    self.endings[rank] = supposed

    def _is_consequence(self, ending: Ending, record: ErrorRecord | None) -> bool:
        """Return whether this rank's exception only says that the rank waited in vain for other ranks, and does not say
        what happened to those."""
        waited = record is not None and (record.secondary or record.type == StartTimeout.__name__)
        told = record is not None and record.type in ("Mismatch", "WeightsDiffer")
        if record is not None and record.type == StartTimeout.__name__:
            # If a rank had ended by itself before, this exception does say what happened, since the rank could not take
            # part any more.
            told = any(not each.stopped and each.code == 0 and each.time < _time(ending, record) for each in self._ends)
        return waited and not told and self._blame_of(ending, record) is None

    def _follows_end(self, ending: Ending, record: ErrorRecord | None) -> bool:
        """Return whether this rank was killed after an agent that was asked to end had ended workers, so that a program
        which ends all ranks once it misses some (mpirun) has killed it."""
        before = any(each.stopped and each.time < ending.time for each in self._ends)
        return bool(self._told_to_end) and record is None and ending.code == -SIGKILL and before

    @property
    def _ends(self) -> list[Ending]:
        """The endings of all ranks' processes, without ranks that were lost while the others continued."""
        return [ending for rank, ending in self.endings.items() if rank not in self._excused]

    def _find(self) -> tuple[Ending, ErrorRecord | None] | None:
        cause = find_cause(self._ends, self._records, self._left)
        if cause is not None and cause[1] is not None and cause[1].tells_of_peer:
            # The rank of which it tells may have exited with code 0, even before it began to train.
            for ending in sorted(self._ends, key=lambda each: each.time):
                if ending.code == 0 and not ending.stopped and ending.time <= _time(*cause):
                    self.leave(ending.rank)
            cause = find_cause(self._ends, self._records, self._left)
        if self._held is not None and self._held.rank in self.endings:
            held = self.endings[self._held.rank]
            gave_up = cause is not None and cause[1] is not None and cause[1].secondary
            # If no rank stopped waiting for the rank that could not continue, that rank has recovered and is not the
            # cause.
            if gave_up or (cause is None and held.stopped):
                cause = held, None
        if cause is not None and self._lost_at < _time(*cause):
            return None  # its worker was ended because the agent was lost, so it is not the cause
        return cause

    def _failure(self, ending: Ending, record: ErrorRecord | None, begun: float, stacks: Sequence[Path]) -> Failure:
        own = stacks_path(self._logs, ending.rank)
        return Failure(
            ending=ending,
            record=record,
            seconds=max(0.0, _time(ending, record) - begun),
            pid=self._members[ending.rank].pid,
            host=self._slots[ending.rank].host,
            log=log_path(self._logs, ending.rank),
            stopped=sorted(
                each.rank
                for each in self.endings.values()
                if each.code and each is not ending and each.rank not in self._excused
            ),
            stacks=[path for path in stacks if path != own],
            last_words=last_line(self._tails[ending.rank]),
            blame=self._blame_of(ending, record),
            alike=self._alike(ending),
        )

    def _alike(self, first: Ending) -> int:
        """Return the number of workers if all of them failed by themselves in the same way as `first`, after the same
        number of steps; else 0."""

        def facts(each: Ending) -> tuple[int, int, str]:
            record = self._records.get(each.rank)
            return each.code, each.step, record.text if record is not None else ""

        endings = self._ends
        alike = len(endings) > 1 and all(facts(each) == facts(first) and not each.stopped for each in endings)
        return len(endings) if alike and first.code else 0

    def _blame_of(self, ending: Ending, record: ErrorRecord | None) -> Blame | None:
        if record is None and self._held is not None and ending.rank == self._held.rank:
            return self._blame
        if record is None and ending.rank in self._left and (ending.code == 0 or ending.stopped):
            return Blame.of_early(ending)
        return self._blame if record is not None and record.secondary and self._held is None else None


def _time(ending: Ending, record: ErrorRecord | None) -> float:
    """Return the time of the failure. If an exception was reported, this is when it was raised, which is before the
    process ends; otherwise it is when the process ended."""
    return record.time if record is not None and record.time else ending.time
