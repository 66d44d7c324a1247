"""Finds the first cause of a job's end among everything that its agents and workers reported."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

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
"""Seconds within which the launcher learns of a rank's step."""
LOSS_SECONDS = 1.0
"""Seconds within which the launcher learns that an agent was lost, while ranks may fail at once."""
UNCAUGHT = 1
"""Python's exit code after an uncaught exception."""


class Cause:
    """Collects the facts about each rank's end, and decides which rank failed first once all have ended."""

    def __init__(
        self,
        slots: Sequence[Slot],
        members: Sequence[Member],
        logs: Path,
        patience: float,
        silence: Callable[[float], Blame | None],
    ) -> None:
        """logs: folder of the ranks' logs. patience: least seconds for which ranks wait for a rank that cannot
        continue. silence: called with the time; returns the Blame for hosts that do not receive each other's packets,
        or None."""
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
        """The first rank that could not continue, so that another rank gave up waiting for it."""
        self._blame: Blame | None = None
        self._excused: set[int] = set()
        """Ranks that were lost while the others continued training without them."""
        self._error = ""
        """Why the first agent was lost, or could not start its workers."""
        self._told_to_end = ""
        """How the first agent was told to end by something other than the launcher."""
        self._gave_up_at = float("-inf")
        """Time at which a rank gave up waiting while hosts did not hear each other (time.time)."""
        self._lost_at = float("inf")
        """Time at which the first agent was lost (time.time); infinite if none was."""

    def complained(self, event: Event) -> None:
        """Record what a rank has written to stderr."""
        rank = event.frame["rank"]
        self._tails[rank] = (self._tails[rank] + event.frame.body)[-TAIL_BYTES:]

    def lose(self, text: str, at: float = float("inf")) -> None:
        """Record that an agent was lost, or could not start its workers. at: when (time.time); infinite if unknown."""
        if not self._error or at < self._lost_at < float("inf"):
            self._error = text
        self._lost_at = min(self._lost_at, at)
        if self._held is None and at < self._gave_up_at + LOSS_SECONDS:
            self._blame = None  # the rank that gave up noticed this loss, and not that hosts did not hear each other

    def tell_to_end(self, text: str) -> None:
        """Record that an agent was told to end. A cluster does so also because another host was lost, of which it may
        know before the launcher does, so the loss of an agent counts more."""
        self._told_to_end = self._told_to_end or text

    def excuse(self, ranks: Collection[int]) -> None:
        """Record that the other ranks continue training without these ranks, whose exits are therefore no cause of the
        job's end."""
        self._excused.update(ranks)

    def join(self, rank: int) -> None:
        """Record that a new worker trains in place of this rank, and forget how the rank's former worker ended."""
        self._excused.discard(rank)
        self._tails[rank] = b""
        for facts in (self.endings, self._records, self._said):
            facts.pop(rank, None)
        if rank in self._left:
            self._left.remove(rank)

    def leave(self, rank: int) -> None:
        """Record that a rank's script is over. The exit code of its process is recorded later, by `end`."""
        if rank not in self._left:
            self._left.append(rank)

    def exits(self, event: Event) -> None:
        """Record that a rank's script has called `sys.exit` with a text. Whether this call ends the process is decided
        later, by `end`."""
        self._said[event.frame["rank"]] = ErrorRecord.of_exit(event.frame.header)

    def ending(self, event: Event) -> None:
        """Record a report that a rank's script is over."""
        self.leave(event.frame["rank"])

    def hold(self, member: Member) -> None:
        """Record that other ranks gave up waiting for this rank, because it cannot continue."""
        if self._held is None:
            self._held = member
            self._blame = Blame.of_held(member.condition)

    def give_up(self, rank: int, record: ErrorRecord, now: float) -> None:
        """Record an exception of this rank. The exception ends the process unless it was raised in a thread other than
        the main one."""
        known = self._records.get(rank)
        # The main thread's exception ends the process, so it replaces another thread's. Among all others, the first
        # exception counts.
        if known is None or (known.thread and not record.thread):
            self._records[rank] = record
        # Failures that ranks report after the loss of a host are consequences of that loss.
        explained = self._held is not None or self._error or self._told_to_end
        if record.secondary and record.type != "Mismatch" and not explained:
            held = next((each for each in self._members if each.rank != rank and self._keeps_waiting(each, now)), None)
            if held is not None:
                self.hold(held)
            elif self._blame is None and (blame := self._silence(now)) is not None:
                self._blame, self._gave_up_at = blame, record.time

    def _keeps_waiting(self, member: Member, now: float) -> bool:
        """Whether a rank has been unable to continue for as long as others wait for it."""
        return bool(member.held) and now - member.seen > self._patience - BEAT_SECONDS

    def end(self, ending: Ending) -> ErrorRecord | None:
        """Record a worker's exit. Returns the exception that ended it, from the worker's report or from the traceback
        in its output."""
        self.endings[ending.rank] = ending
        if ending.code == 0 and not ending.stopped:
            self._records.pop(ending.rank, None)  # exit code 0 shows that the exception did not end the process
        elif ending.rank not in self._records and ending.code == UNCAUGHT and not ending.stopped:
            tail = self._tails[ending.rank]
            said = self._said.get(ending.rank)
            # When sys.exit(text) ends a process, Python prints the text, so its end must be in the stored output.
            if said is not None and said.message[-SAID_LETTERS:] in tail.decode(errors="replace"):
                record: ErrorRecord | None = said
            else:
                record = ErrorRecord.from_stderr(tail)
            if record is not None:
                self._records[ending.rank] = record
        return self._records.get(ending.rank)

    def judge(self, begun: float, stacks: Sequence[Path]) -> Failure | None:
        """Return the job's failure, or None if the job ended well. begun: time at which the job began. stacks: files
        with the ranks' stack traces. Raises LaunchError if the job failed but no worker is the cause."""
        cause = self._find()
        known = self._excused | self.endings.keys()
        untold = [slot for slot in self._slots if slot.rank not in known]
        if cause is not None and not ((self._error or self._told_to_end or untold) and self._is_consequence(*cause)):
            return self._failure(*cause, begun, stacks)
        if self._error:
            raise LaunchError(self._error)
        rank, host = (untold[0].rank, untold[0].host) if untold else (-1, "")
        if self._told_to_end:
            also = f"; it is not known how rank {rank} on {host} has ended: its agent has not told" if untold else ""
            raise LaunchError(self._told_to_end + also)
        if untold:
            where = f"{host}: " if host else ""
            raise LaunchError(f"{where}it is not known how rank {rank} has ended: its agent has not told")
        return None

    def _is_consequence(self, ending: Ending, record: ErrorRecord | None) -> bool:
        """Whether this rank's exception only says that it waited in vain for other ranks, and not what happened to
        them."""
        waited = record is not None and (record.secondary or record.type == StartTimeout.__name__)
        told = record is not None and record.type in ("Mismatch", "WeightsDiffer")
        if record is not None and record.type == StartTimeout.__name__:
            # A rank that had ended by itself before could not come any more, and this exception says so.
            told = any(not each.stopped and each.code == 0 and each.time < _time(ending, record) for each in self._ends)
        return waited and not told and self._blame_of(ending, record) is None

    @property
    def _ends(self) -> list[Ending]:
        """How the processes of ranks ended, without ranks that were lost while the others continued."""
        return [ending for rank, ending in self.endings.items() if rank not in self._excused]

    def _find(self) -> tuple[Ending, ErrorRecord | None] | None:
        cause = find_cause(self._ends, self._records, self._left)
        if self._held is not None and self._held.rank in self.endings:
            held = self.endings[self._held.rank]
            gave_up = cause is not None and cause[1] is not None and cause[1].secondary
            # If no rank gave up waiting for the rank that could not continue, that rank has recovered and is not the
            # cause.
            if gave_up or (cause is None and held.stopped):
                cause = held, None
        if cause is not None and self._lost_at < _time(*cause):
            return None  # the workers were ended because the agent was lost, so none of them is the cause
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
    """Time of the failure: when the exception was raised, if known, as this comes before the exit; else when the
    process ended."""
    return record.time if record is not None and record.time else ending.time
