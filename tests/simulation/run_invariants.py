"""What has to hold across all attempts of a job: what is started when, and what the user is told of hosts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dadt import errors
from dadt.errors import NotResumed, StartTimeout
from dadt.launch.ending.outcome import Ended, Outcome
from dadt.launch.ending.preemption import Preempted
from dadt.launch.hosts.candidates import PAUSE_SECONDS
from dadt.launch.hosts.host import Host
from dadt.launch.start.torch_world import fewest
from simulation.world import Broken

if TYPE_CHECKING:
    from simulation.job import SimulatedJob
    from simulation.run import SimulatedRun

WAITS = re.compile(
    r"^(?:waiting for hosts: )?(?P<named>no host|host[\w, ]*?)"
    r"(?: with room for (?P<room>\d+) workers of (?P<most>\d+)| for \d+ workers)?"
    r"(?:; (?P<failed>.*) failed, to be tried again)?(?: after --start-timeout .*)?$"
)
NOT_STARTED, NOT_AGAIN = "nothing was started", "it was not started again"


class RunInvariants:
    """Knows all attempts, and compares."""

    def __init__(self, run: SimulatedRun) -> None:
        self._run = run

    @property
    def _has_trained(self) -> bool:
        """Whether workers were started in any attempt."""
        return any(attempt.launcher.job is not None for attempt in self._run.attempts)

    # While it runs -------------------------------------------------------------------------------------------------

    def begins(self, attempt: SimulatedJob, hosts: Sequence[Host]) -> None:
        """The agents of an attempt on these hosts are about to be started."""
        run = self._run
        before = run.attempts[:-1]
        names = {host.name for host in hosts}
        self._check_hosts(before, names)
        for other in before:
            guilty = other.invariants.guilty_hosts(run.world.now)
            for agent in other.every_agent:
                used = agent.process.name in names or attempt.hosts == 1
                stands = agent.process.stops or agent.machine in guilty  # or has just gone on
                if used and not stands and (agent.process.alive or agent.left):
                    raise Broken(f"an attempt starts while {agent.process.name} still runs one before")
        attempt.resumes = bool(before) and not run.restarts.refused
        refused = sum(other.resumes and _refused(other.launcher.outcome) for other in before)
        if len(before) > run.config.max_restarts + refused:
            raise Broken(f"the job is started for the {len(before) + 1}th time")
        if any(other.invariants.ended_by_user for other in before) and not run.caught:
            raise Broken("the job is started again, though the user has ended it")
        places = [_place(other.launcher.outcome) for other in before]
        if len(places) > 1 and places[-1] is not None and places[-1] == places[-2]:
            raise Broken(f"attempts that have failed alike are followed by another: {places[-1]}")

    def _check_hosts(self, before: Sequence[SimulatedJob], names: set[str]) -> None:
        """An attempt is made on hosts that are there, and have not failed just now."""
        if before and not self._has_trained:
            raise Broken("the job is started again, though it was never started")
        if not names <= self._run.listed:
            raise Broken(f"an attempt is made on hosts that are not there: {names - self._run.listed}")
        if before and (ended := before[-1].launcher.ended_at) is not None:
            launcher, soon = before[-1].launcher, self._run.world.now - PAUSE_SECONDS / 2
            just = [node for node in launcher.nodes if node.failed and launcher.lost_at.get(node, ended) > soon]
            if (failed := {node.name for node in just}) & names:
                raise Broken(f"an attempt is made at once on hosts that have just failed: {failed & names}")

    def placed(self, attempt: SimulatedJob) -> None:
        """The workers of an attempt are about to be started."""
        config = self._run.config
        if attempt.size < fewest(config):
            raise Broken(f"{attempt.size} workers are started, at least {fewest(config)} were wanted")
        for agent in attempt.agents:
            if agent.how in ("has a problem", "has another version"):
                raise Broken(f"workers are started on {agent.process.name}, which {agent.how}")

    def said(self, level: str, text: str) -> None:
        """The user reads a line."""
        if text.startswith("waiting for hosts: "):
            self._check_lack(text)

    def _check_lack(self, text: str) -> None:
        """What is said to lack is lacking."""
        run = self._run
        if "no answer yet" in text:
            if run.answered:
                raise Broken(f"the user is told of an answer that lacks, which does not: {text}")
            return
        if (found := WAITS.match(text)) is None:
            raise Broken(f"the user is told nothing of use: {text}")
        named = [] if found["named"] == "no host" else found["named"].split(", ")
        failed = set(found["failed"].replace("this host", "").split(", ")) if found["failed"] else set()
        if {*named, *failed} != run.listed:
            raise Broken(f"the user is told of other hosts than there are: {text}")
        if found["room"] is not None:
            room = len(named) * run.scenario.per_host
            if room != int(found["room"]) or room >= int(found["most"]):
                raise Broken(f"the user is told of a lack that there is not: {text}")
        struck = [each for attempt in run.attempts for each in attempt.invariants.struck]
        hosts = {host for each in struck for host in each.hosts | each.near}
        guilty = {"" if run.scenario.hosts == 1 else f"host{host}" for host in hosts}
        if failed and not failed & guilty:
            raise Broken(f"the user is told of hosts that have failed, which have not: {text}")

    # At the end ----------------------------------------------------------------------------------------------------

    def ended(self) -> None:
        """Nothing is left to happen."""
        self._check_left()
        run = self._run
        run.snapshots.ended()
        if run.outcome is None and run.error is None:
            return  # it was killed
        self._check_words(str(run.error) if run.error is not None else "")
        by_user = any(attempt.invariants.ended_by_user for attempt in run.attempts)
        if isinstance(run.error, Ended | Preempted) and not by_user:
            raise Broken(f"it ended as if the user had ended it: {run.error}")
        if isinstance(run.error, StartTimeout) and run.waits:
            self._check_patience(str(run.error))
        if not by_user:
            self._check_last()

    def _check_left(self) -> None:
        for attempt in self._run.attempts:
            for worker in attempt.workers:
                agent = worker.agent
                if worker.process.alive and not agent.process.stops:
                    raise Broken(f"rank {worker.rank} (pid {worker.pid}) is left on {agent.process.name}")
            for agent in attempt.every_agent:
                if agent.process.alive and not agent.process.stops:
                    raise Broken(f"the agent of {agent.process.name} is left")

    def _check_words(self, text: str) -> None:
        if NOT_STARTED in text and self._has_trained:
            raise Broken(f"it has trained, and says: {text}")
        if NOT_AGAIN in text and not self._has_trained:
            raise Broken(f"it was never started, and says: {text}")

    def _check_patience(self, text: str) -> None:
        """Too few hosts were there for long before the job gave up."""
        run, now = self._run, self._run.world.now
        self._check_lack(text)
        listed = run.list
        if run.process.stops or listed.problem or listed.seconds > 1:
            return
        # while one question for hosts is open, there is no other one
        before = (answer for asked, answer in run.questions if asked < listed.changed_at)
        since = now - max([listed.changed_at, *before])
        paused = run.discovery.candidates.due(now) < float("inf")
        stopped = any(each.tries for attempt in run.attempts for each in attempt.invariants.struck)
        if since < listed.seconds + 1.0 or paused or stopped:
            return
        if len(listed.hosts) * run.scenario.per_host >= fewest(run.config):
            raise Broken(f"enough hosts have been there for {since:.0f} s: {text}")

    def _check_last(self) -> None:
        """A job that has failed was started again as often as it may be."""
        run = self._run
        last, before = run.attempt, run.attempts[:-1]
        failed = last.launcher.error is not None or (run.outcome is not None and run.outcome.failure is not None)
        told_to_end = run.outcome is not None and run.outcome.told_to_end
        if not failed or told_to_end or run.waits or not self._has_trained or len(before) >= run.config.max_restarts:
            return
        if before and _is_alike(before[-1].launcher.outcome, run.outcome):
            return
        raise Broken(f"the job may be started again {run.config.max_restarts - len(before)} times, and was not")


def _refused(outcome: Outcome | None) -> bool:
    """Whether an attempt could not go on from its snapshot."""
    return outcome is not None and outcome.failure is not None and outcome.failure.says(NotResumed)


def _place(outcome: Outcome | None) -> tuple[object, ...] | None:
    """Where and how an attempt has failed by what its script does."""
    failure = outcome.failure if outcome is not None else None
    if failure is None or failure.record is None or hasattr(errors, failure.record.type) or failure.ending.code < 0:
        return None
    return failure.step, failure.record.text


def _is_alike(one: Outcome | None, other: Outcome | None) -> bool:
    """Whether two attempts may be taken for the same failure."""

    def facts(outcome: Outcome | None) -> tuple[object, ...] | None:
        failure = outcome.failure if outcome is not None else None
        if failure is None:
            return None
        return failure.step, failure.record.text if failure.record is not None else failure.ending.code

    return facts(one) is not None and facts(one) == facts(other)
