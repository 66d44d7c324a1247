"""Decides whether a failed job is restarted as a whole, up to `--max-restarts` times, and on which hosts."""

from __future__ import annotations

from collections.abc import Sequence
from signal import SIGKILL, SIGTERM
from typing import Any, NamedTuple

from dadt.config import Config
from dadt.errors import ConfigError, DadtError, LaunchError, NotResumed, Sharded, StartTimeout
from dadt.launch.actions import ActionQueue, SayText
from dadt.launch.ending.failure import Failure
from dadt.launch.ending.outcome import Outcome, end_early
from dadt.launch.ending.preemption import Preempted
from dadt.launch.ending.signals import of_checkpoint
from dadt.launch.hosts.candidates import LONGEST_PAUSE_SECONDS, NEVER
from dadt.launch.hosts.discovery import ANSWER_SECONDS, ASK_SECONDS, Discovery
from dadt.launch.hosts.host import Host
from dadt.launch.start.torch_world import fewest

SILENT_SECONDS = 2.0
"""Seconds of waiting for hosts after which the user is told what is missing."""
FROM_OUTSIDE = (-SIGKILL, -SIGTERM)
"""Exit codes of workers that something other than DADT has killed, such as a scheduler, or the kernel for lack of
memory."""


FIRST_STEPS = 50
"""With `--batch memory`, a worker that runs out of memory within this number of steps continues with smaller batches.
"""
LARGEST_DIVISOR = 1024


class NoteRestart(NamedTuple):
    """Action: record why an attempt failed, and that restart `number` follows."""

    number: int
    why: str


class Restarts:
    """Decides what follows each attempt to run a job, and on which hosts. Each attempt starts all workers again, and
    all attempts use the same log folder."""

    def __init__(self, config: Config, discovery: Discovery) -> None:
        self._config = config
        self._discovery, self._candidates = discovery, discovery.candidates
        self.outbox = ActionQueue[SayText | NoteRestart]()
        self.count = 0
        """Number of restarts of the job so far."""
        self.refused = False
        """Whether the last attempt failed because it could not be resumed from its snapshot."""
        self.island = config.island
        """The value of `--island` for the next attempt."""
        self.divisors: dict[int, int] = {}
        """For each rank that ran out of memory, the number by which it divides the script's batch size in the next
        attempt."""
        self._most = config.max_restarts
        self._before: Any = None
        """Step and error of the last attempt, as `_place` returns them; None if it was ended from outside or had no
        outcome."""
        self._since: float | None = None
        """Time (time.monotonic) at which the job began to wait for hosts; None if it does not wait."""
        self._told = ""

    # Methods that are called before an attempt
    # --------------------------------------------------------------------------

    def ask_seconds(self, now: float) -> float:
        """Return the minimum seconds between two requests for the list of hosts. While the job waits for hosts, the
        pause is as long as the job had waited at the last request, so the waiting time doubles with each request. It is
        0 right after an attempt, and when --start-timeout is over."""
        if self._since is None:
            return 0.0 if self.count else ASK_SECONDS
        if now - self._since > self._config.start_timeout:
            return 0.0
        return min(max(ASK_SECONDS, self._discovery.asked - self._since), LONGEST_PAUSE_SECONDS)

    def hosts(self, now: float) -> list[Host] | None:
        """Return the hosts for the next attempt; None while there are too few. For the first attempt, the hosts are
        known already. Raises StartTimeout if there are still too few after --start-timeout seconds."""
        if self._since is None:
            self._since, self._told = now, ""
        since, waited = self._since, now - self._since
        patience = min(ANSWER_SECONDS, self._config.start_timeout)
        asked = not self.count or self._discovery.answered >= since or waited > patience
        hosts = self._candidates.usable(now)
        enough = self._suffice(hosts)
        if asked and enough:
            self._since = None
            return hosts
        what = "no answer yet to the question which there are" if enough else self._lack(hosts)
        if waited > self._config.start_timeout and self._is_final(now) and self._candidates.due(now) == NEVER:
            raise StartTimeout(f"{what} after --start-timeout {self._config.start_timeout:g} s")
        if waited > SILENT_SECONDS and what != self._told:
            self._told = what
            self.outbox.put(SayText(f"waiting for hosts: {what}", "info"))
        return None

    def _is_final(self, now: float) -> bool:
        """Return whether it is known which hosts existed at the end of --start-timeout, or no answer to this question
        can be expected any more."""
        assert self._since is not None
        end = self._since + self._config.start_timeout
        return self._discovery.answered >= end or now > end + ANSWER_SECONDS

    def signal(self, caught: set[int]) -> None:
        """Handle signals that `dadt run` received while it waits for hosts. Raises Ended or Preempted if one of them
        ends the job."""
        end_early(caught, of_checkpoint(self._config), again=self.count > 0)

    def kill(self) -> None:
        """Handle `dadt kill` while the job waits for hosts. Raises Ended."""
        end_early({SIGTERM}, 0, again=self.count > 0)

    def _suffice(self, hosts: Sequence[Host]) -> bool:
        """Return whether the hosts have enough slots for the minimum number of workers. The slots of a host may be
        unknown until its agent has reported."""
        if not fewest(self._config):
            return bool(hosts) and len(hosts) == len(self._candidates.hosts)
        return self._room(hosts) >= fewest(self._config)

    def _lack(self, hosts: Sequence[Host]) -> str:
        """Return a text for the user about what is missing for the next attempt."""
        named = ", ".join(map(str, hosts)) or "no host"
        away = [host.name or "this host" for host in self._candidates.hosts if host not in hosts]
        failed = f"; {', '.join(away)} failed, to be tried again" if away else ""
        if not (least := fewest(self._config)):
            return f"{named}{failed}"
        if not hosts:
            return f"no host for {least} workers{failed}"
        return f"{named} with room for {self._room(hosts):g} workers of {least}{failed}"

    def _room(self, hosts: Sequence[Host]) -> float:
        """Return how many workers fit on these hosts. If the number of slots of a host is not set, it counts as one
        slot until all hosts are available, and as infinitely many from then on."""
        unknown = float("inf") if len(hosts) == len(self._candidates.hosts) else 1
        return sum(host.slots or unknown for host in hosts)

    # Methods that are called after an attempt
    # ---------------------------------------------------------------------------

    def ended(self, outcome: Outcome) -> bool:
        """Handle the outcome of an attempt. Returns whether another attempt follows."""
        resumed, self.refused = self.count and not self.refused, False
        outcome.restarts = self.count
        failed: Failure | DadtError | None = outcome.failure
        # Only this one host was asked to end, so the job can restart on the other hosts.
        if outcome.preemption is not None and outcome.preemption.host:
            failed = Preempted(outcome.preemption.text)
        if resumed and outcome.failure is not None and outcome.failure.says(NotResumed):
            self.refused = True
            # An attempt that could not resume has not trained and does not count as a restart. The next attempt uses no
            # snapshot.
            self._most += 1
        ends, record = outcome.signal or outcome.told_to_end, outcome.failure and outcome.failure.record
        if not ends and record and record.type == Sharded.__name__ and self.island == "auto":
            self.island = "host"
            self._most += 1
            self._begin_again(record.message, record.message, "info")
            return True
        if not ends and outcome.failure is not None and self._halves(outcome.failure):
            return True
        return not ends and failed is not None and self._again(failed)

    def _halves(self, failure: Failure) -> bool:
        """Halve the batch size of a rank that ran out of memory in its first steps. Returns whether the job starts
        again with the smaller batches."""
        rank, wanted = failure.ending.rank, self._config.batch == "memory" and failure.out_of_memory
        divisor = 2 * self.divisors.get(rank, 1)
        if not wanted or (failure.step or 0) > FIRST_STEPS or divisor > LARGEST_DIVISOR:
            return False
        self.divisors[rank] = divisor
        self._most += 1
        why = f"worker {rank} has run out of memory"
        text = f"{why}: the job begins again, and it trains on 1/{divisor} of the script's batch size (--batch memory)"
        self._begin_again(why, text, "warning")
        return True

    def failed(self, error: DadtError, hosts: Sequence[Host], now: float, *, began: bool) -> bool:
        """Handle the error of an attempt that ended without an outcome. Returns whether another attempt follows. hosts:
        hosts of the attempt. began: whether workers were placed on hosts in this or an earlier attempt. If not, the
        error probably comes from the user's settings and would occur again."""
        if isinstance(error, LaunchError | StartTimeout):
            self._candidates.blame(hosts, now)
        is_last = isinstance(error, LaunchError) and error.is_last
        again = isinstance(error, LaunchError | StartTimeout | ConfigError) and not is_last
        return again and began and self._again(error)

    def _again(self, failed: Failure | DadtError) -> bool:
        if self.count == self._most:
            return False
        now = _place(failed)
        if now is not None and now == self._before:
            text = f"attempts {self.count} and {self.count + 1} failed alike: no restart"
            self.outbox.put(SayText(text, "warning"))
            return False
        self._before = now
        why = failed.lines()[0] if isinstance(failed, Failure) else str(failed)
        self._begin_again(why, f"{why}: restart {self.count + 1} of {self._most}", "warning")
        return True

    def _begin_again(self, why: str, text: str, level: str) -> None:
        """Count a restart, record its reason `why`, and show `text` to the user."""
        self.count += 1
        self.outbox.put(SayText(text, level))
        self.outbox.put(NoteRestart(self.count, why))


def _place(failed: Failure | DadtError) -> Any:
    """Return a value that is equal for two attempts which failed in the same way at the same step; None for an attempt
    that was ended from outside or has no outcome."""
    if isinstance(failed, DadtError) or (failed.ending.code in FROM_OUTSIDE and not failed.ending.stopped):
        return None
    return failed.step, failed.record.text if failed.record is not None else failed.ending.code
