"""A running job, seen from the launcher: start, wait, terminate."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dadt.control import private_files
from dadt.control.frame import Frame
from dadt.errors import DadtError, LaunchError
from dadt.launch.crew import Crew, Node
from dadt.launch.failure import Blame, Ending, Failure, Record, find_cause, last_line, signal_name, steps_text
from dadt.launch.hosts.slot import Slot
from dadt.launch.monitor.journal import Journal
from dadt.launch.monitor.members import Member, Rendezvous
from dadt.launch.monitor.output import Output
from dadt.launch.monitor.silence import Silences
from dadt.launch.monitor.watch import View, Watch
from dadt.launch.processes import sweep
from dadt.launch.query import OWN_INQUIRY, Query
from dadt.launch.signals import Interrupts

UNCAUGHT = 1
"""Python's exit code after an uncaught exception."""
TURN_SECONDS = 0.5
MOST_SAID = 10_000
"""Different lines of the workers, each of which is printed once."""
PRIMARY_SECONDS = 1.0
"""After a failure that another one caused: how long to wait for that other one to show itself."""
EXIT_SECONDS = 1.0
"""After an uncaught exception was reported: how long the worker may take to exit."""
FAILURE_GRACE = 1.0
"""From SIGTERM to SIGKILL after a failure. After the user's Ctrl-C it is --grace."""
DUMP_SECONDS = 30.0
"""All stacks are written at most this often because of a stall."""
END_SECONDS = 5.0
"""How long an agent may take beyond that until all is gone."""
HANG_UP_SECONDS = 4.0
"""How long an agent whose launcher hangs up may take to end its workers."""
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Say = Callable[[str, str], None]
"""Takes a text and its level, info or warning."""


@dataclass(kw_only=True)
class Outcome:
    """How a job ended."""

    seconds: float
    failure: Failure | None = None
    signal: int = 0
    """The signal by which the user ended it."""
    summaries: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """What each rank reported at the end of its training."""
    results: Mapping[int, bytes] = field(default_factory=dict)
    """What each rank's function returned or raised, where `dadt.run` has called one."""
    hooked: bool = False
    """At least one worker imported torch with DADT hooked in."""
    stepped: bool = False
    """An optimizer of theirs has made a step, also where the process has ended by os._exit and told nothing."""
    stuck: Sequence[int] = ()
    """Processes that did not die of SIGKILL."""

    @property
    def exit_code(self) -> int:
        if self.signal:
            return 128 + self.signal
        return self.failure.exit_code if self.failure else 0


class Unread(DadtError):
    """Ended by the user while nobody read our output."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal_name(number)} while nobody read the output; all workers stopped")
        self.exit_code = 128 + number


class Job:
    """One per `dadt run`. `wait` does all the work, in the thread that calls it."""

    def __init__(
        self,
        job: str,
        crew: Crew,
        slots: Sequence[Slot],
        output: Output,
        journal: Journal,
        say: Say,
        grace: float,
        verbose: bool = False,
        timeout: float = float("inf"),
    ) -> None:
        """crew: all agents are ready. grace: from SIGTERM to SIGKILL when the user ends the job. timeout: seconds for
        which ranks wait for one that cannot go on."""
        self._timeout = timeout
        self._held_since = 0.0
        self._job = job
        self._crew = crew
        self._slots = slots
        self._output = output
        self._say = say
        self._user_grace = grace
        self._rendezvous = Rendezvous([slot.host for slot in slots])
        self.watch = Watch(self._rendezvous.members, journal)
        self._query: Query | None = None
        self._silences = Silences(crew.nodes, say, journal)
        self._ports: dict[int, int] = {}
        """Where each host listens for the others' heartbeats."""
        self._verbose = verbose
        self._views: list[View] = []
        self._said: set[str] = set()
        self._unsaid: list[str] = []
        """What the user is to be told as soon as nothing else is being written."""
        self._endings: dict[int, Ending] = {}
        self._records: dict[int, Record] = {}
        self._outcome = Outcome(seconds=0.0)
        self._stacks: list[Path] = []
        self._dumped = float("-inf")
        """When a worker last asked for them."""
        self._working: set[Node] = set(crew.nodes)
        """Those whose workers are not all reported to have ended."""
        self._fail_at = float("inf")
        """When to stop everything because of what has failed so far."""
        self._end_by = float("inf")
        """When the agents that were told to stop must have done so."""
        self._grace = float("inf")
        self._hang_up = HANG_UP_SECONDS
        self._error: str | None = None
        self._lost_time = float("inf")
        """When the first agent was lost."""
        self._deaths: list[Frame] = []
        """What all ranks are still to be told of one that has ended."""
        self._held: Member | None = None
        """What could not go on when the first rank gave up waiting, and how that is told."""
        self._blame: Blame | None = None
        self._left: list[int] = []
        """Ranks that ended well while others went on, as they left."""

    def start(self, orders: Sequence[Frame]) -> None:
        """Tell each node's agent what to start."""
        self._begin = time.monotonic()
        self._begin_time = time.time()
        ranks: dict[int, set[int]] = {}
        for slot in self._slots:
            ranks.setdefault(slot.cross_rank, set()).add(slot.rank)
        for cross_rank, (node, order) in enumerate(zip(self._crew.nodes, orders, strict=True)):
            node.ranks = frozenset(ranks[cross_rank])
            self._crew.send(node, order)
            if node.ended:
                self._lose(node, "was lost before it could start its workers")

    def serve(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Answer other commands of this user at the socket. facts: of the job, which do not change."""
        self._query = Query(path, self._crew, self.watch, facts, lambda: self.end(signal.SIGTERM, "dadt kill"))

    def show(self, view: View) -> None:
        """Keep this one up to date, too, until the job is over, and close it."""
        self._views.append(view)

    def wait(self, interrupts: Interrupts | None) -> Outcome:
        """Until nothing of the job is left. SIGINT, SIGTERM and SIGHUP end it gently, a second one at once; other
        signals among the interrupts go to all workers.

        Raises LaunchError where the workers could not be started or an agent is lost.
        """
        if interrupts is not None:
            self._crew.watch(interrupts, lambda: self._interrupt(interrupts.take()))
        try:
            while self._working:
                for node, frame in self._crew.turn(self._patience()):
                    self.watch.see(frame)
                    # Kinds that only the beginning knows come too late.
                    getattr(self, f"_on_{frame.kind}", _ignore)(node, frame)
                self._turn()
        finally:
            if interrupts is not None:
                self._crew.forget(interrupts)
            self._close()
        return self._judge()

    def end(self, number: int, who: str) -> float:
        """By the user: gently, and at once if asked again. Returns the seconds until it is by force."""
        if self._outcome.signal:
            self.terminate(0.0, who)
        else:
            self._outcome.signal = number
            self.terminate(self._user_grace, who)
            self._unsaid.append(f"{who}: stopping the workers (once more: at once)")
        return self._grace

    def attend(self, interrupts: Interrupts | None) -> None:
        """What must go on while whoever reads our output takes nothing. Raises Unread if the user has asked twice."""
        self._crew.beat()
        caught = interrupts.take() if interrupts is not None else set()
        again = self._outcome.signal and caught & set(ENDING_SIGNALS)
        self._interrupt(caught)
        if again:
            raise Unread(self._outcome.signal)

    def terminate(self, grace: float, why: str, stacks: bool = False) -> None:
        """SIGTERM to all workers, and SIGKILL after `grace` seconds; the second call can only hasten it."""
        if grace < self._grace:
            self._grace = grace
            self.watch.stops(why, grace)
            self._end_by = time.monotonic() + grace + END_SECONDS
            self._crew.send_all(Frame("stop", {"grace": grace, "stacks": stacks}))

    def _turn(self) -> None:
        now = time.monotonic()
        for text in self._unsaid:
            self._say(text, "info")
        self._unsaid.clear()
        self._rendezvous.settle()
        self._silences.turn()
        if now >= self._fail_at:
            self._fail_at = float("inf")
            self.terminate(FAILURE_GRACE, "a worker failed", stacks=True)
        self._look_for_held(now)
        for death in self._deaths:  # once stacks are asked for, which show where each rank was
            self._crew.send_all(death)
        self._deaths.clear()
        if now >= self._end_by:
            # An agent is stuck: it is killed, and its workers with it.
            self._working.clear()
            self._hang_up = 0.0

    def _look_for_held(self, now: float) -> None:
        """Where all ranks have ended but some that cannot go on, nobody else gives up on those."""
        living = [member for member in self._rendezvous.members if not member.ended]
        if not living or len(living) == len(self._rendezvous.members) or not all(member.held for member in living):
            self._held_since = now
        elif now - self._held_since > self._timeout and self._held is None:
            self._held = living[0]
            self._blame = Blame.of_held(living[0].condition)
            self._fail_by(0.0)

    def _patience(self) -> float:
        now = time.monotonic()
        turn = 0.05 if self._rendezvous.waiting else TURN_SECONDS
        turn = min(turn, self._output.tick(), self._fail_at - now, self._end_by - now)
        if self._query is not None:
            turn = min(turn, self._query.turn())
        for view in self._views:
            turn = min(turn, view.tick())
        return max(0.0, turn)

    def _interrupt(self, caught: set[int]) -> None:
        for number in caught - set(ENDING_SIGNALS):
            self._crew.send_all(Frame("signal", {"number": number}))
        if number := min(caught & set(ENDING_SIGNALS), default=0):
            self.end(number, signal_name(number))

    def _on_lost(self, node: Node, frame: Frame) -> None:
        self._lost_time = min(self._lost_time, frame.get("time", float("inf")))
        self._lose(node, f"{frame['message']}; all its workers were stopped")
        for slot in self._slots:
            if slot.cross_rank == self._crew.nodes.index(node):
                member = self._rendezvous.members[slot.rank]
                member.ended = True
                member.sign("is on a host whose agent is gone")

    def _lose(self, node: Node, text: str) -> None:
        """The first that is told counts."""
        self._error = self._error or (f"{node.name}: {text}" if node.name else text)
        self._working.discard(node)
        if self._working:
            self._fail_by(0.0)

    def _on_started(self, node: Node, frame: Frame) -> None:
        self._rendezvous.members[frame["rank"]].pid = frame["pid"]

    def _on_unstarted(self, node: Node, frame: Frame) -> None:
        self._error = self._error or (f"{node.name}: {frame['message']}" if node.name else frame["message"])
        self._fail_by(0.0)

    def _on_out(self, node: Node, frame: Frame) -> None:
        self._output.write(frame["rank"], frame.kind, frame.body)

    _on_err = _on_out

    def _on_beat(self, node: Node, frame: Frame) -> None:
        for rank, (step, age) in frame["steps"].items():
            member = self._rendezvous.members[int(rank)]
            member.went_to(step, age)
            member.condition = frame["conditions"].get(rank, "")

    def _on_hello(self, node: Node, frame: Frame) -> None:
        self._outcome.hooked = True
        self._rendezvous.members[frame["rank"]].sign("has imported torch, not begun to train")

    def _on_claim(self, node: Node, frame: Frame) -> None:
        member = self._rendezvous.members[frame["rank"]]
        member.pid = frame["pid"]
        member.claimed = True
        member.sign("has begun to train")

    def _on_numbers(self, node: Node, frame: Frame) -> None:
        self._rendezvous.members[frame["rank"]].went_to(frame["step"], 0.0)

    def _on_say(self, node: Node, frame: Frame) -> None:
        if frame["text"] not in self._said and len(self._said) < MOST_SAID:
            self._said.add(frame["text"])
            self._say(frame["text"], frame["level"])

    def _on_failed(self, node: Node, frame: Frame) -> None:
        record = Record.from_header({**frame.header, "time": frame["time"] - node.clock})
        known = self._records.get(frame["rank"])
        # What ends the process is the main thread's exception; of several others the first counts.
        if known is None or (known.thread and not record.thread):
            self._records[frame["rank"]] = record
        if record.secondary and record.type != "Mismatch" and self._held is None:
            others = (member for member in self._rendezvous.members if member.rank != frame["rank"])
            self._held = next((member for member in others if member.held), None)
            if self._held is not None:
                self._blame = Blame.of_held(self._held.condition)
            else:
                self._blame = self._blame or self._silences.blame()
        if not record.thread:
            self._fail_by(EXIT_SECONDS)

    def _on_ending(self, node: Node, frame: Frame) -> None:
        member = self._rendezvous.members[frame["rank"]]
        member.went_to(frame["steps"], 0.0)
        member.finished = True
        self._leave(member.rank)
        member.sign(f"has ended after {frame['steps']} steps")

    def _leave(self, rank: int) -> None:
        if rank not in self._left:
            self._left.append(rank)

    def _on_done(self, node: Node, frame: Frame) -> None:
        self._outcome.summaries = {**self._outcome.summaries, frame["rank"]: frame["summary"]}
        self._rendezvous.members[frame["rank"]].finished = True

    def _on_exchange(self, node: Node, frame: Frame) -> None:
        line = frame["line"]
        self._rendezvous.give(
            frame["key"], frame["rank"], frame.body, frame["timeout"], lambda answer: self._answer(node, line, answer)
        )

    def _on_put(self, node: Node, frame: Frame) -> None:
        self._answer(node, frame["line"], self._rendezvous.put(frame["key"], frame["rank"], frame.body))

    def _on_get(self, node: Node, frame: Frame) -> None:
        line = frame["line"]
        self._rendezvous.get(
            frame["keys"], frame["rank"], frame["timeout"], lambda answer: self._answer(node, line, answer)
        )

    def _on_result(self, node: Node, frame: Frame) -> None:
        self._outcome.results = {**self._outcome.results, frame["rank"]: frame.body}
        self._answer(node, frame["line"], Frame("taken"))

    def _on_peers(self, node: Node, frame: Frame) -> None:
        peers = [self._seen_from(frame["rank"], member) for member in self._rendezvous.members]
        self._answer(node, frame["line"], Frame("peers", {"peers": peers}))

    def _seen_from(self, rank: int, member: Member) -> dict[str, Any]:
        told = {**member.describe(), "said": member.state}
        text = self._silences.between(self._slots[rank].cross_rank, self._slots[member.rank].cross_rank)
        return {**told, "state": f"is unreachable, as {text} ({told['state']})"} if text and not member.ended else told

    def _on_heartbeat(self, node: Node, frame: Frame) -> None:
        self._ports[self._crew.nodes.index(node)] = frame["port"]
        if len(self._ports) == len(self._crew.nodes):
            hosts = [
                {"index": index, "address": self._crew.nodes[index].address, "port": port}
                for index, port in self._ports.items()
                if port
            ]
            self._crew.send_all(Frame("heartbeat", {"hosts": hosts}))

    def _on_silent(self, node: Node, frame: Frame) -> None:
        self._silences.silent(self._crew.nodes.index(node), frame["peer"], frame["seconds"])

    def _on_heard(self, node: Node, frame: Frame) -> None:
        self._silences.heard(self._crew.nodes.index(node), frame["peer"])

    def _on_unheard(self, node: Node, frame: Frame) -> None:
        other = self._crew.nodes[frame["peer"]]
        if self._verbose:
            self._say(
                f"{node.name} hears no UDP from {other.name} at {other.address}, as where a firewall lets none "
                "through: silence between them will not be noticed",
                "info",
            )

    def _on_exit(self, node: Node, frame: Frame) -> None:
        ending = Ending(**{**frame.header, "time": frame["time"] - node.clock})
        self._endings[ending.rank] = ending
        self._outcome.stepped |= ending.step > 0
        member = self._rendezvous.members[ending.rank]
        trains = member.claimed and not member.finished
        who = f"rank {member.rank} ({member.place}) {ending.text}"
        member.ended = True
        member.sign(ending.text)
        if ending.code == 0:
            self._records.pop(ending.rank, None)  # an exception that did not end the process
            if trains and not ending.stopped:
                self._leave(ending.rank)
                text = f"{who} after {steps_text(ending.step)}, while others went on"
                self._deaths.append(Frame("death", {"text": text, "steps": max(0, ending.step)}))
        elif not ending.stopped:
            record = self._record(ending)
            secondary = record is not None and record.secondary
            if not secondary:
                self._deaths.append(Frame("death", {"text": f"{who} after {steps_text(ending.step)}"}))
            self._fail_by(PRIMARY_SECONDS if secondary else 0.0)
        self._rendezvous.settle()

    def _stacks_of(self, rank: int) -> Path:
        return self._output.folder / f"rank{rank}.stacks"

    def _on_stacks(self, node: Node, frame: Frame) -> None:
        path = self._stacks_of(frame["rank"])
        try:
            with private_files.open_file(path, "ab", inner=True) as file:  # those of a stall say more than what follows
                file.write(b"\n" * bool(file.tell()) + frame.body)
        except OSError as error:
            self._say(f"{path} could not be written: {error.strerror}", "warning")
            return
        if path not in self._stacks:
            self._stacks.append(path)

    def _on_dump(self, node: Node, frame: Frame) -> None:
        """A worker that waits in vain wants to know where all are. Those that wait for the same ask together."""
        now = time.monotonic()
        if now - self._dumped < DUMP_SECONDS:
            return
        self._dumped = now
        living = [slot.rank for slot in self._slots if not self._rendezvous.members[slot.rank].ended]
        self._crew.send_all(Frame("stacks", {"number": OWN_INQUIRY, "ranks": living}))
        self._say(f"the stacks of all ranks go to {self._stacks_of(0).with_name('rank*.stacks')}", "warning")

    def _on_stack(self, node: Node, frame: Frame) -> None:
        if frame["number"] == OWN_INQUIRY:
            self._on_stacks(node, Frame("stacks", frame.header, frame.body or frame["problem"].encode()))
        elif self._query is not None:
            self._query.told(frame)

    def _on_end(self, node: Node, frame: Frame) -> None:
        self._outcome.stuck = [*self._outcome.stuck, *frame["stuck"]]
        if number := frame["signal"]:
            text = (
                f"the agent of this host (pid {node.report['pid']}) was told to end by signal {number} "
                f"({signal_name(number)}); all its workers were stopped"
            )
            self._lose(node, text)
        self._working.discard(node)

    def _answer(self, node: Node, line: int, answer: Frame) -> None:
        header = {"line": line, "answer": {"kind": answer.kind, **answer.header}}
        self._crew.send(node, Frame("answer", header, answer.body))

    def _fail_by(self, seconds: float) -> None:
        self._fail_at = min(self._fail_at, time.monotonic() + seconds)

    def _record(self, ending: Ending) -> Record | None:
        """What the worker reported, or else what its traceback tells."""
        if ending.rank not in self._records and ending.code == UNCAUGHT:
            record = Record.from_stderr(self._output.tails[ending.rank].data)
            if record is not None:
                self._records[ending.rank] = record
        return self._records.get(ending.rank)

    def _close(self) -> None:
        """Nothing of the job outlives this, even if its agents were killed."""
        self._crew.close(self._hang_up)
        self._outcome.stuck = sweep(f"DADT_JOB={self._job}") or self._outcome.stuck
        if self._query is not None:
            self._query.close()
        self._output.close()
        for view in self._views:
            view.close()

    def _judge(self) -> Outcome:
        outcome = self._outcome
        outcome.seconds = time.monotonic() - self._begin
        cause = find_cause(list(self._endings.values()), self._records, self._left)
        if cause is not None and cause[1] is not None and cause[1].secondary and self._held is not None:
            held = self._endings.get(self._held.rank)
            cause = (held, None) if held is not None else cause
        if cause is None and self._held is not None:
            held = self._endings.get(self._held.rank)
            cause = (held, None) if held is not None and held.stopped else None  # or it went on, and all ended well
        if cause is not None and self._lost_time < _time(*cause):
            cause = None  # a scheduler, or silence, ended the others because of it
        if cause is not None and not outcome.signal:
            outcome.failure = self._failure(*cause)
        elif self._error is not None and not outcome.signal:
            raise LaunchError(self._error)
        elif not outcome.signal and (lost := [slot.rank for slot in self._slots if slot.rank not in self._endings]):
            raise LaunchError(f"it is not known how rank {lost[0]} has ended: its agent has not told")
        return outcome

    def _failure(self, ending: Ending, record: Record | None) -> Failure:
        member = self._rendezvous.members[ending.rank]
        at = _time(ending, record)
        return Failure(
            ending=ending,
            record=record,
            seconds=max(0.0, at - self._begin_time),
            pid=member.pid,
            host=self._slots[ending.rank].host,
            log=self._output.path(ending.rank),
            stopped=sorted(each.rank for each in self._endings.values() if each.code and each is not ending),
            stacks=[path for path in self._stacks if path != self._stacks_of(ending.rank)],
            last_words=last_line(self._output.tails[ending.rank].data),
            blame=self._blame_of(ending, record),
        )

    def _blame_of(self, ending: Ending, record: Record | None) -> Blame | None:
        if record is None and self._held is not None and ending.rank == self._held.rank:
            return self._blame
        if record is None and ending.rank in self._left:
            return Blame.of_early(ending)
        return self._blame if record is not None and record.secondary and self._held is None else None


def _ignore(node: Node, frame: Frame) -> None: ...


def _time(ending: Ending, record: Record | None) -> float:
    """When it failed: an exception is raised before the exit."""
    return record.time if record is not None and record.time else ending.time
