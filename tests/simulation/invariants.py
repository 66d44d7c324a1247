"""What has to hold in every job, whatever goes wrong, after each turn of the launcher and at the end."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dadt.comm.executors.meet import PATIENCE
from dadt.config.check import NEVER
from dadt.control.agent_client import ANSWER_SECONDS
from dadt.launch.agent.host_job import DEFAULT_GRACE
from dadt.launch.ending.outcome import Ended
from dadt.launch.ending.preemption import Preempted
from dadt.launch.ending.termination import END_SECONDS
from dadt.launch.members.islands import with_islands
from dadt.launch.members.replacement import replaces
from simulation.data_invariants import check_shares
from simulation.door import SRUN
from simulation.fault import FOR_GOOD, SOON_SECONDS, Struck
from simulation.outcome_invariants import OutcomeInvariants
from simulation.worker_snapshots import WRITE_SECONDS
from simulation.world import EPOCH, Broken

if TYPE_CHECKING:
    from dadt.launch.job import Job
    from dadt.launch.monitor.watch import Watch
    from simulation.data import Connection, Operation, Rank
    from simulation.job import SimulatedJob
    from simulation.launcher import Launcher
    from simulation.worker import Worker
    from simulation.worker_training import StepTold

NOTICE_SECONDS = 1.0
"""What it takes until a pause, or its end, is known. Meanwhile others have waited for as long as a step or a save
takes."""
JOIN_SECONDS = 8.0
"""A host takes the place of a lost one within this time: it is reached, tells what it has, and the others try it."""
AGAIN_SECONDS = 4.0
"""A new worker starts at most so long after the loss of the first one."""
LATE = re.compile(r"(?:is not connected|has not answered yet)(?:, given up| after \d+ s)$")
LATE_SECONDS = 4.0
"""A message takes at most so long where nothing is cut."""
LET_IN_STEPS = 15
"""Within so many steps of the others a new worker trains with them, once it has started."""
SILENT = re.compile(r"^host(\d+)(?: has heard nothing from| and) host(\d+).* no heartbeat comes through between them$")
STARTS = re.compile(r"a new worker starts in place of rank (\d+)")
TOLD_TO_END = re.compile(r"(host\d+) was told to end")
UNREACHABLE = re.compile(r"is unreachable, as host(\d+) (?:and|has heard nothing from) host(\d+)")
KNOWN_SECONDS = 6.0
"""Within this time each agent, and then the launcher, knows what is no more."""
FINISHED = re.compile(r"^ranks? (?P<ranks>[\d, and]+) finished before the others, which train on$")
GOES_ON = re.compile(
    r"^(?:rank (?P<rank>\d+) |host(?P<host>\d+): ).*: training goes on without (?:it|them|the island of .*)$"
)

CROSSED = ": islands wait for each other"
FAILED_WAITING = re.compile(r" failed with (?:StartTimeout|PeerLost): (.*): training goes on without ")


class Invariants:
    """Knows all that has really happened, and compares."""

    def __init__(self, job: SimulatedJob, before: Invariants | None) -> None:
        """before: those of the attempt before."""
        self._job = job
        known = before.struck if before is not None else ()
        self.struck = [each for each in known if each.stays and each.until > job.world.now]
        """All faults that have happened, in the order of time, and of those before this attempt what is left."""
        self._since, self._frames = job.world.now, job.world.frames
        self._trained: dict[int, int] = {}
        """The newest generation in which all ranks have taken a step together; with islands for each place in them."""
        self._read = 0
        """How many lines to the user have been looked at."""
        self._lost: set[int] = set()
        self._agreed: dict[Connection, list[int]] = {}
        """For each connection the weights with which its ranks train on."""

    def _is_guilty(self, struck: Struck, at: float) -> bool:
        """Whether a fault may have ended a rank or the job by this time."""
        if not struck.tries:
            return True
        config, script = self._job.config, self._job.scenario.script
        patience = min(config.timeout, config.start_timeout)
        if config.on_stall == "abort":
            patience = min(patience, config.stall_warning)
        if struck.tries == "lines":
            patience = min(patience, config.orphan_timeout, ANSWER_SECONDS)
        elif struck.tries == "ranks":
            patience = min(patience, ANSWER_SECONDS) if struck.hosts else patience
        lasted = sum(min(at, each.until) - each.at for each in self.struck if each.tries and each.at < at)
        waited = NOTICE_SECONDS + 1.5 * script.step_seconds + script.save_seconds
        if config.snapshot_every != NEVER:  # at its end a rank writes those for which its steps left no time
            writing = 1.5 * WRITE_SECONDS
            waited += writing + script.steps * max(0.0, writing - 0.5 * script.step_seconds)
        # ranks that had begun to wait for another one have not told so yet, and count as silent since then
        told = PATIENCE + 1.5 * script.step_seconds
        before = [each for each in self.struck if each.at < struck.at]
        before = [each for each in before if struck.at <= told + (each.at if each.until == FOR_GOOD else each.until)]
        waited += max((min(told, struck.at - each.at) for each in before), default=0.0)
        # who has not come yet is waited for since the start
        if min(at - patience, struck.at) - self._job.begun < 2 * script.start_seconds:
            waited += 2 * script.start_seconds
        return lasted + waited > patience

    @property
    def _watch(self) -> Watch:
        job = self._job.launcher.job
        assert job is not None
        return job.watch

    def guilty_ranks(self, at: float) -> set[int]:
        """Ranks that may be lost or blamed at this time."""
        guilty = [each for each in self.struck if (each.ranks or each.hosts) and self._is_guilty(each, at)]
        return {rank for each in guilty for rank in self.ranks_of(each)}

    def ranks_of(self, struck: Struck) -> set[int]:
        """The ranks that a fault makes guilty."""
        return struck.ranks.union(*(self._job.ranks_of(host) for host in struck.hosts))

    def guilty_hosts(self, at: float) -> set[int]:
        """Hosts of which the same is true."""
        return {host for each in self.struck if each.hosts and self._is_guilty(each, at) for host in each.hosts}

    @property
    def ended_by_user(self) -> bool:
        """Whether the user has ended the job, and not only a host was taken away."""
        return any(each.user and not each.hosts for each in self.struck)

    def starts_badly(self, host: int, how: str) -> None:
        """The agent of a host is started, and something is the matter with it."""
        self._job.world.note("fault", f"host{host} {how}")
        self.struck.append(Struck(self._job.world.now, f"host{host} {how}", hosts=frozenset([host]), fatal=False))

    def raises(self, rank: int, error: Exception) -> None:
        """The script of a rank raises this at its start."""
        self.struck.append(Struck(self._job.world.now, f"rank {rank} raises {error}", ranks=frozenset([rank])))

    # While it runs -------------------------------------------------------------------------------------------------

    def turned(self, launcher: Launcher) -> None:
        """The launcher has done all that was due."""
        said, self._read = launcher.said[self._read :], len(launcher.said)
        for at, _, text in said:
            self._check_line(at, text)
        now = self._job.world.now
        for question in launcher.open:
            if question.generation < launcher.generation:
                raise Broken(f"generation {launcher.generation} has begun, and a rank still waits: {question.text}")
            agent = self._job.agents[question.rank // self._job.per_host]  # it may not be able to tell of an end
            if now > question.until and any(each.rank == question.rank for each in agent.left):
                raise Broken(f"a rank waits longer than it has asked for: {question.text}")
        if now > launcher.end_by and launcher.job is not None and not launcher.job.over:
            raise Broken("agents that were told to stop their workers are waited for too long")

    def _check_line(self, at: float, text: str) -> None:
        if (found := STARTS.match(text)) is not None:
            agent = self._job.agents[int(found[1]) // self._job.per_host]
            if any(each.rank == int(found[1]) for each in agent.left):
                raise Broken(f"the user is told that a worker starts, and the old one runs: {text}")
        if (finished := FINISHED.match(text)) is not None:
            newest = {worker.rank: worker for worker in self._job.workers}
            ranks = {int(each) for each in re.findall(r"\d+", finished["ranks"])}
            if any(newest[rank].code != 0 or not newest[rank].closing for rank in ranks):
                raise Broken(f"the user is told of one that has finished, which has not: {text}")
        told = TOLD_TO_END.match(text)
        by_cluster = told is not None and self._job.machines[int(told[1].removeprefix("host"))].ended_by
        by_others = told is not None and any(each.text == f"{told[1]} is told to end" for each in self.struck)
        if told is not None and not (by_cluster or by_others):
            raise Broken(f"the user is told that a host was told to end, which was not: {text}")
        text = text.partition(": since ")[2] or text  # the reason of another rank is told first
        found = GOES_ON.match(text)
        if found is not None and found["host"] and self._is_new(int(found["host"])):
            return  # it has not joined: nobody is blamed who has trained
        if found is not None:
            # Of two hosts that do not hear each other, either may go where no third one tells which is cut off.
            hosts = {int(each) for each in re.findall(r"host(\d+)", text)}
            guilty = self.guilty_ranks(at)
            named = {int(each) for each in re.findall(r"rank (\d+) \(", text.partition(" were silent")[0])}
            if found["rank"] and " were silent" in text:  # which one of an island has kept the others is not known
                told = bool(named & guilty) and named <= {*with_islands(guilty, self._job.launcher.slots)}
            else:
                # where nothing is heard of a rank, another one of its island is named that has failed for it
                unknown = with_islands(guilty - self._job.launcher.exits, self._job.launcher.slots)
                told = (
                    int(found["rank"]) in {*guilty, *unknown} if found["rank"] else bool(hosts & self.guilty_hosts(at))
                )
            waited = FAILED_WAITING.search(text)  # it has failed as it waited, and what it says names one of those
            if f"{CROSSED}: " in text and self.struck:
                return  # a loss has left islands that wait so, of which one has to go
            told = told or bool(waited and {int(each) for each in re.findall(r"rank (\d+)", waited[1])} & guilty)
            if not told:
                raise Broken(f"the user is told of one that has done nothing: {text}")

    def _is_new(self, host: int) -> bool:
        """Whether a host that is to join has no workers yet."""
        agent = self._job.machines.get(host)
        return agent is None or agent.host is None

    def completed(self, connection: Connection, operation: Operation) -> None:
        """All ranks of a connection have come to an operation."""
        if not operation.name.startswith("step "):
            return
        for rank in operation.values:
            self.trains(connection.ranks[rank])
        place = min(connection.ranks) % (self._job.island_size or 1)
        if connection.generation < (newest := self._trained.get(place, 0)):
            raise Broken(f"generation {connection.generation} trains beside generation {newest}")
        self._trained[place] = connection.generation
        told: Sequence[StepTold] = list(operation.values.values())
        if len({each.weights for each in told}) > 1:
            raise Broken(f"ranks train on with different weights in {operation.name}: {operation.values}")
        self._job.run.snapshots.trained(operation.name, told[0])
        check_shares(told, connection.generation, redistribute=self._job.config.redistribute)

    def regrouped(self, members: Sequence[int]) -> None:
        """The launcher has told which ranks train on."""
        if {*with_islands(members, self._job.launcher.slots)} != {*members}:
            raise Broken(f"islands train on without some of their ranks: {members}")

    def starts_anew(self, launcher: Launcher, rank: int) -> None:
        """The launcher has a new worker started in place of a lost rank: there is something left to train."""
        members = [gauge.member for gauge in self._watch.gauges]
        began = {member.rank for member in members if not (member.lost or member.joined)}
        if began and began <= launcher.at_end:
            raise Broken(f"a new worker is started in place of rank {rank}, though all others are at their end")

    def trains(self, worker: Rank) -> None:
        """A rank has taken a step: its host still hears the launcher, or has not been without it for long."""
        job, now = self._job, self._job.world.now
        agent = worker.agent
        if not agent.process.alive:
            raise Broken(f"rank {worker.rank} trains on without an agent")
        ends = max(DEFAULT_GRACE, job.config.grace) + END_SECONDS
        silent = now - agent.heard > job.config.orphan_timeout + ends and job.hosts > 1
        if agent.process.runs and (silent or now - agent.lost > ends):
            raise Broken(f"rank {worker.rank} trains on without the launcher")

    def saves(self, worker: Worker) -> None:
        """A rank saves: it was asked to, as often as the user has asked."""
        decided, hosts = self._job.launcher.job, [agent.host for agent in self._job.agents]
        preempted = any(host is not None and host.stop is not None for host in hosts)
        asked = (decided.saves if decided is not None else 0) + preempted
        if worker.saves_raised > asked:
            raise Broken(f"rank {worker.rank} saves for the signal {worker.saves_raised}, of {asked} that were sent")

    def check_state(self, peer: Mapping[str, Any]) -> None:
        """What a rank is told of another one, which it may tell the user, is true of the world."""
        job, now = self._job, self._job.world.now
        known = now - KNOWN_SECONDS - sum(each.seconds for each in job.scenario.faults if each.delays)
        if (found := UNREACHABLE.search(peer["state"])) is not None:
            pair = {int(found[1]), int(found[2])}
            if not any(pair & each.near and each.at < now and each.until > known for each in self.struck):
                raise Broken(f"a rank is told of a cut that there is not: {peer}")
        if "is stopped" in peer["state"]:
            workers = [each for each in job.workers if each.pid == peer["pid"]]
            if not any(each.process.stops or each.went_on > known for each in workers):
                raise Broken(f"a rank is told that another one is stopped, which is not: {peer}")

    def agree(self, worker: Worker, furthest: Sequence[int]) -> None:
        """A rank has found out how far the others are, and is as far, with the same weights."""
        connection, training = worker.peers.connection, worker.training
        assert connection is not None
        if sorted(connection.ranks) != list(worker.peers.members):
            raise Broken(f"rank {worker.rank} believes in {worker.peers.members}, but trains with {connection.ranks}")
        if training.averages != furthest:
            raise Broken(f"rank {worker.rank} trains on from steps {training.averages}, others from {furthest}")
        weights = self._agreed.setdefault(connection, training.weights[:])
        if training.weights != weights:
            raise Broken(f"rank {worker.rank} trains on with other weights than the others")

    # At the end ----------------------------------------------------------------------------------------------------

    def ended(self) -> None:
        """The attempt is over."""
        launcher = self._job.launcher
        if launcher.job is None:
            self._check_start(launcher)
            return
        self._check_numbers(launcher.job)
        self._check_lost(launcher.job)
        self._check_silences(launcher)
        self._check_replaced(launcher)
        self._check_joined(launcher)
        OutcomeInvariants(self._job, self).check(launcher)

    def _check_start(self, launcher: Launcher) -> None:
        """Workers were not started, for a reason that there is."""
        error, now = launcher.error, self._job.world.now
        if isinstance(error, Ended | Preempted):
            return  # looked at once all is over
        hosts = self.guilty_hosts(now) | {host for each in self.struck for host in each.near}
        if not hosts:
            raise Broken(f"nothing was wrong, and it was not started: {error}")
        told = [text for _, level, text in launcher.said if level == "error"] or [str(error)]
        for text in told:
            named = {int(each) for each in re.findall(r"host(\d+)", text)} or set(range(self._job.hosts))
            late = LATE.search(text)
            if SRUN in text and named - hosts:
                continue  # it was ended for another one
            if late is None and not named & hosts:
                raise Broken(f"it blames a host that has done nothing: {text}")
            heard = named - {host for each in self.struck for host in each.near}
            if late is not None and any(self._job.machines[host].ready_at < now - LATE_SECONDS for host in heard):
                raise Broken(f"it says that a host is not ready, which is: {text}")

    def _check_numbers(self, decided: Job) -> None:
        job = self._job
        seconds, frames = job.world.now - self._since, job.world.frames - self._frames
        each = 20 + 4 * seconds
        most = each * (job.hosts + job.size) + 40 * job.size * (1 + len(decided.watch.generations))
        if frames > most:
            raise Broken(f"{frames} frames in {seconds:.0f} s, {most:.0f} are the most")

    def _check_lost(self, decided: Job) -> None:
        for loss in decided.watch.losses:
            hosts = {int(each) for each in re.findall(r"host(\d+)", loss.why)} if loss.why.startswith("host") else set()
            at = loss.time - EPOCH
            guilty = with_islands(self.guilty_ranks(at), self._job.launcher.slots)
            crossed = loss.why.endswith(CROSSED) and bool(self.struck)  # a loss has left islands that wait so
            if not crossed and loss.rank not in guilty and not hosts & self.guilty_hosts(at):
                raise Broken(f"rank {loss.rank} was lost and had done nothing: {loss.why}")

    @property
    def _trained_until(self) -> float:
        """When the first of the ranks that began the job, and are left, has taken its last step."""
        members = [gauge.member for gauge in self._watch.gauges]
        began = {member.rank for member in members if not (member.lost or member.joined)}
        return min((worker.stepped_at for worker in self._job.workers if worker.rank in began), default=0.0)

    def _check_replaced(self, launcher: Launcher) -> None:
        """Where nobody waits for another, a lost rank whose host is there is started again, and joins."""
        job = self._job
        if not replaces(job.config) or launcher.outcome is None or launcher.end_by < float("inf"):
            return
        for loss in self._watch.losses:
            due = loss.time - EPOCH + AGAIN_SECONDS < self._trained_until
            killed = all(each.fatal for each in self.struck)
            again = any(each.rank == loss.rank and each.born > loss.time - EPOCH for each in job.workers)
            if due and killed and not again:
                raise Broken(f"no new worker was started in place of rank {loss.rank}")
        self._check_let_in(launcher)

    def _check_let_in(self, launcher: Launcher) -> None:
        """Where ranks step together, a new worker trains soon, if no other rank is lost meanwhile."""
        job, script = self._job, self._job.scenario.script
        losses, alone = launcher.job.watch.losses, len(self.struck) == 1 and self.struck[0].fatal
        if job.config.algorithm == "gossip" or len(losses) != 1 or not alone:
            return
        due = losses[0].time - EPOCH + AGAIN_SECONDS + 2 * script.start_seconds + LET_IN_STEPS * script.step_seconds
        if (
            due < self._trained_until
            and script.gathers_seldom
            and not any(each.peers.is_new and each.trains for each in job.workers)
        ):
            raise Broken("a new worker was started, and the others have not let it in")

    def _check_joined(self, launcher: Launcher) -> None:
        """A host that is there takes the place of a lost one, while others train."""
        job = self._job
        lost = [each for each in self.struck if each.gone]
        hindered = any(each.hinders or each.at < job.begun for each in self.struck)
        if job.scenario.spares < len(lost) or hindered or launcher.end_by < float("inf"):
            return
        trained = self._trained_until
        joined = sum("joins: new workers" in text for *_, text in launcher.said)
        if joined < sum(each.at + each.noticed + JOIN_SECONDS < trained for each in lost if not self._is_mute(each)):
            raise Broken(f"no host has joined in place of {', '.join(each.text for each in lost)}")

    def _is_mute(self, lost: Struck) -> bool:
        """Whether another host is gone, which is not known yet, so that it is waited for as hosts are to join."""
        others = [each for each in self.struck if each.noticed and each is not lost]
        joined_by = lost.at + lost.noticed + JOIN_SECONDS
        return any(each.at < joined_by and each.at + each.noticed > lost.at for each in others)

    def _check_silences(self, launcher: Launcher) -> None:
        """What the user is told of hosts that do not hear each other was true, and its end is told, too."""
        lines = [(at, text) for at, _, text in launcher.said]
        for at, text in lines:
            if (found := SILENT.match(text)) is None or launcher.ended_at is None:
                continue
            pair = int(found[1]), int(found[2])
            if not any(each.at < at and set(pair) & each.near for each in self.struck):
                raise Broken(f"the user is told of a cut that there is not: {text}")
            one, other = min(pair), max(pair)
            again = f"host{one} and host{other} hear each other again"
            still = all(self._job.machines[host].process.runs for host in pair)
            still = still and not any("joins: new workers" in told for _, told in lines)
            mended = max((each.until for each in self.struck if set(pair) & each.near), default=at)
            due = max(at, mended) + SOON_SECONDS
            if still and due < launcher.ended_at and not any(again in told for later, told in lines if later > at):
                raise Broken(f"the user is not told of the end of it: {text}")
