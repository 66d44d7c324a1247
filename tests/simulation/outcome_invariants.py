"""What has to hold for how an attempt to run a job ended: its exit code, and whom the user is told to blame."""

from __future__ import annotations

import re
from signal import SIGTERM
from typing import TYPE_CHECKING

from dadt.launch.ending.failure import Failure
from dadt.launch.members.islands import with_islands
from simulation.fault import SOON_SECONDS, Struck
from simulation.worker_peers import LIBRARY
from simulation.world import Broken

if TYPE_CHECKING:
    from simulation.invariants import Invariants
    from simulation.job import SimulatedJob
    from simulation.launcher import Launcher

HEARD_SECONDS = 2.0
"""Seconds after the start of the workers in which all hosts have heard each other."""
NOT_TOLD = "its agent has not told"
NAMED_HOST = re.compile(r"(?:^| on )host(\d+)(?=: | has ended)")


class OutcomeInvariants:
    """Compares the end of an attempt with what has happened in it."""

    def __init__(self, job: SimulatedJob, known: Invariants) -> None:
        """known: all that has really happened."""
        self._job, self._known = job, known

    def check(self, launcher: Launcher) -> None:
        """The attempt is over."""
        outcome, error = launcher.outcome, launcher.error
        ended = outcome is not None and (outcome.signal or outcome.preemption is not None)
        too_late = launcher.heeds == {SIGTERM} and self._job.checkpoint_signal  # it does not hasten what has failed
        if launcher.heeds and not ended and not too_late:
            raise Broken(f"the user has sent {launcher.heeds}, which has not ended it")
        by_user = any(each.user for each in self._known.struck)
        if outcome is not None and (outcome.signal or outcome.preemption is not None):
            if not by_user:
                raise Broken("it ended as if the user had ended it")
            return
        if outcome is not None and outcome.failure is not None and outcome.failure.record is None:
            ending = outcome.failure.ending
            stood = any(each.tries and ending.rank in each.ranks for each in self._known.struck)
            if (
                not (stood and outcome.failure.blame is not None)  # it was stopped before, for which others have failed
                and ending.code
                and not ending.stopped
                and launcher.exit_code != (ending.code if ending.code > 0 else 128 - ending.code)
            ):
                raise Broken(f"it ended with exit code {launcher.exit_code}, and not that of its cause: {ending}")
        if launcher.end_by < float("inf") and not launcher.exit_code and not self._all_end_well(launcher):
            raise Broken("it has told its workers to stop, and ended well")
        if launcher.exit_code and self._enough_are_left:
            raise Broken("enough ranks were left to train on, and it has failed")
        if error is not None:
            self._check_error(str(error))
        elif outcome is not None and outcome.failure is not None:
            self._check_blame(outcome.failure)
        elif not self._known.struck and not self._job.number:
            # Where nobody waits for another, the last average may have to wait for long.
            warnings = [text for _, level, text in launcher.said if level == "warning"]
            expected = ["in the last average", "the stacks of all ranks go to"]  # the second follows the first
            if self._job.config.algorithm == "gossip" and self._job.config.on_stall == "abort":
                expected.append("all ranks connect anew")  # who has waited there for long has ended its connections
            if warnings := [text for text in warnings if not any(each in text for each in expected)]:
                raise Broken(f"nothing was wrong, and the user was warned: {warnings[0]}")
        elif not self._job.config.min_np and self._fatal and not by_user:
            raise Broken(f"it ended well, though {self._fatal[0].text}")

    def _all_end_well(self, launcher: Launcher) -> bool:
        """Whether all ranks that were not lost have ended with code 0, as where they come to their end just as they are
        given up."""
        lost = {loss.rank for loss in launcher.job.watch.losses} if launcher.job is not None else set()
        workers = [worker for agent in self._job.agents for worker in agent.workers.values()]
        return all(worker.code == 0 for worker in workers if worker.rank not in lost)

    @property
    def _fatal(self) -> list[Struck]:
        """Faults that end a job which needs all its ranks."""
        return [each for each in self._known.struck if each.fatal]

    @property
    def _enough_are_left(self) -> bool:
        """Whether ranks were killed, or stopped for good, while all trained, and nothing else was wrong, and --min-np
        allows that."""
        config = self._job.config
        gone = all(each.fatal or (each.held and config.on_stall != "abort") for each in self._known.struck)
        lost, least = (
            with_islands(self._blamable, self._job.launcher.slots),
            config.min_np * (self._job.island_size or 1),
        )
        return least > 0 and gone and self._job.size - len(lost) >= least

    @property
    def _blamable(self) -> set[int]:
        """Ranks that may be blamed for the end of the job."""
        return self._known.guilty_ranks(self._job.launcher.ended_at or self._job.world.now)

    @property
    def _blamable_hosts(self) -> set[int]:
        return self._known.guilty_hosts(self._job.launcher.ended_at or self._job.world.now)

    @property
    def _is_way_cut(self) -> bool:
        """Whether nothing is wrong but that two hosts that had heard each other do not any more."""
        cut, *others = self._known.struck
        ends = self._job.launcher.ended_at or self._job.world.now
        of_two = cut.tries == "ranks" and len(cut.hosts) == 2 and cut.hosts == cut.near
        heard = cut.at > self._job.begun + HEARD_SECONDS
        return of_two and heard and cut.until > ends and not others and not self._job.config.min_np

    def _names_guilty(self, text: str) -> bool:
        """Whether what a rank says that has waited for others names one of those for whom it was in vain."""
        ranks = {int(each) for each in re.findall(r"rank (\d+)", text)}
        hosts = {int(each) for each in re.findall(r"host(\d+)", text)}
        return bool(ranks & self._blamable or hosts & self._blamable_hosts)

    def _check_error(self, text: str) -> None:
        named = {int(host) for host in NAMED_HOST.findall(text)}
        lone, now = self._job.hosts == 1, self._job.world.now
        if NOT_TOLD in text and any(
            named & each.hosts and each.tries and each.until > now for each in self._known.struck
        ):
            return  # it cannot tell, though nobody has waited for it for long
        if not self._blamable_hosts or not (lone or named & self._blamable_hosts):
            raise Broken(f"it blames a host that has done nothing: {text}")

    def _check_blame(self, failure: Failure) -> None:
        rank, decided = failure.ending.rank, self._job.launcher.job
        assert decided is not None
        if failure.record is not None and failure.record.type == "StartTimeout":  # its message says who did not come
            named = {int(each) for each in re.findall(r"rank (\d+) \(", failure.record.message)}
            if not named & self._blamable:
                raise Broken(f"it blames ranks that have done nothing: {failure.record.message}")
            return
        told = " / ".join(failure.lines()[:3])
        if not self._blamable:
            raise Broken(f"it failed, though nothing was wrong: {told}")
        if rank in {loss.rank for loss in decided.watch.losses if loss.replaced is None}:
            raise Broken(f"it blames rank {rank}, without which the others have trained on: {told}")
        waited = failure.record is not None and failure.record.secondary
        if waited and failure.blame is None and self._is_way_cut:
            raise Broken(f"it does not tell of the way between two hosts that has failed: {told}")
        library = failure.record is not None and failure.record.message == LIBRARY
        if library and (self._blamable_hosts or not self._job.config.min_np):
            return  # its words know no more, and without --min-np the launcher is not asked
        held = all(each.held for each in self._known.struck)
        if rank not in self._blamable and (held or not (waited and self._names_guilty(told))):
            raise Broken(f"it blames rank {rank}, which has done nothing: {told}")
        # what has ended a rank is no cause before its agent, which may be stopped or cut off, has told that
        known = [each for each in self._fatal if each.ranks & self._job.launcher.exits]
        if self._job.config.min_np or not known:
            return
        first = known[0]
        since = [each.at for each in self._known.struck if rank in self._known.ranks_of(each)]
        if since and min(since) > first.at + SOON_SECONDS:
            raise Broken(f"it blames rank {rank}, though before that {first.text}: {told}")
