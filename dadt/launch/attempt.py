"""Runs one attempt of a job, from the start of its agents until none of its processes is left, by carrying out what Job
decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dadt.control.job_folder import Folder
from dadt.control.uptime import uptime
from dadt.launch import actions
from dadt.launch.actions import Action, Event, Outbox, Steps
from dadt.launch.agents import Agents
from dadt.launch.channel import Launcher
from dadt.launch.ending.outcome import Outcome, end_early
from dadt.launch.ending.processes import sweep
from dadt.launch.ending.signals import Interrupts, of_checkpoint
from dadt.launch.hosts.candidates import Candidates
from dadt.launch.hosts.reader import HostReader
from dadt.launch.job import Job
from dadt.launch.members.replacement import replaces
from dadt.launch.monitor.output import Output
from dadt.launch.monitor.stacks import Stacks
from dadt.launch.monitor.watch import View, Watch
from dadt.launch.query import Query
from dadt.launch.report import JobReport
from dadt.launch.start import resume
from dadt.launch.start.orders import look, order_to_join, orders
from dadt.launch.start.placement import Placed, place_workers
from dadt.launch.start.plan import Plan
from dadt.launch.start.startup import Voice, gather

HANG_UP_SECONDS = 4.0
"""Seconds that an agent may take to end its workers after the launcher has disconnected."""

Views = Callable[[Placed, Watch], Sequence[View]]
"""Function that creates the views, which display and record a running job. Called once every worker has its host."""


@dataclass(eq=False)
class Attempt:
    """Starts the agents, assigns the workers to hosts, and carries out the job's actions. All of this happens in `run`,
    which may be called once."""

    _plan: Plan
    _launcher: Launcher
    _folder: Folder
    _voice: Voice
    _make_views: Views
    _report: JobReport
    _interrupts: Interrupts | None
    """Source of the signals that this process receives; None if it may not handle signals."""
    _number: int
    """Number of restarts of the job before this attempt."""
    _candidates: Candidates
    _reader: HostReader

    def __post_init__(self) -> None:
        hosts, silence = self._plan.hosts, self._plan.config.orphan_timeout
        self._agents = Agents(self._launcher, hosts, silence, self._report.journal.see)

    def run(self) -> Outcome:
        """Run the job until no process of it is left, and return its outcome. Raises DadtError if the workers could not
        be started, or an agent was lost."""
        self._voice.meanwhile(self._agents.beat)
        try:
            self._where = where = self._place()
            self._prepare(where)
            self._candidates.served((node.host for node in self._agents.nodes), time.monotonic())
            self._job.start(orders(where), time.monotonic(), uptime())
            outcome = self._wait()
            if (failure := outcome.failure) is not None:
                outcome.failure = replace(failure, torch_env=self._plan.config.torch_env)
            return outcome
        finally:
            self._voice.meanwhile(lambda: None)
            self._agents.close(HANG_UP_SECONDS)
            for node in [node for node in self._agents.nodes if node.failed]:
                busy_until = node.busy_until(self._plan.config.orphan_timeout)
                self._candidates.failed(node.host, time.monotonic(), busy_until)
            sweep(self._mark)

    def _place(self) -> Placed:
        """Wait for all agents, and assign each worker its host and rank."""
        interrupts = self._interrupts
        if interrupts is not None:
            self._agents.watch(interrupts, lambda: self._end_early(interrupts.take()))
        where = self._agents.go_through(self._startup(outbox := Outbox()), outbox, self._perform)
        where = replace(where, restarts=self._number)
        if interrupts is not None:
            self._agents.forget(interrupts)
        return replace(where, config=resume.settled(where.config, len(where.slots), self._number))

    def _end_early(self, caught: set[int]) -> None:
        end_early(caught, of_checkpoint(self._plan.config), again=self._number > 0)

    def _startup(self, outbox: Outbox) -> Steps[Placed]:
        config, job, nodes, now = self._plan.config, self._folder.job, self._agents.nodes, time.monotonic()
        needs = {"all_needed": not config.min_np, "again": self._number > 0}
        now = yield from gather(nodes, config.start_timeout, job, self._candidates, outbox, now, **needs)
        return (yield from place_workers(self._plan, nodes, job, outbox, now))

    def _prepare(self, where: Placed) -> None:
        """Create the Job, and the objects that display it, record it, and answer queries about it."""
        config, report = self._plan.config, self._report
        hosts = [slot.host for slot in where.slots]
        self._stacks = Stacks(where.logs, self._warn)
        self._output = Output(where.logs, hosts, config.output, self._voice.lines, self._warn, self._voice.bars_move)
        if self._number:
            self._output.note(f"dadt: restart {self._number}")
        candidates = self._candidates if replaces(config) and self._launcher.extends else None
        facts = (self._agents.nodes, where.slots, where.logs, time.monotonic(), time.time(), candidates)
        self._job = job = Job(config, *facts)
        self._voice.meanwhile(self._attend)
        report.placed(where.config, where.nodes, where.slots, job.watch)
        about = facts_of(where.plan, where.job, where.logs, len(where.nodes))
        self._query = Query(self._folder, self._agents, job.watch, about, self._kill, report.journal.refused)
        self._views = [*self._make_views(where, job.watch), report.interim()]

    def _wait(self) -> Outcome:
        """Carry out the job's actions until no process of the job is left, and return the outcome."""
        job, agents, interrupts = self._job, self._agents, self._interrupts
        if interrupts is not None:
            agents.watch(interrupts, lambda: job.signal(interrupts.take(), time.monotonic()))
        self._carry_out()
        try:
            while not job.over:
                if job.grows:
                    self._reader.poll()
                for node, frame in agents.turn(self._patience()):
                    job.take(Event(node, frame, time.monotonic()))
                    self._carry_out()
                job.turn(time.monotonic())
                self._carry_out()
        finally:
            if interrupts is not None:
                agents.forget(interrupts)
            stuck = self._close()
        return job.judge(time.monotonic(), stuck, self._stacks.paths)

    def _patience(self) -> float:
        seconds = min(self._job.patience(time.monotonic()), self._output.tick(), self._query.turn())
        return max(0.0, min(seconds, *(view.tick() for view in self._views)))

    def _carry_out(self) -> None:
        self._job.outbox.empty(self._perform)

    def _attend(self) -> None:
        """Send heartbeats and handle signals while output to the user is blocked. Raises Preempted or Unread if the
        user has asked twice to end the job."""
        self._agents.beat()
        caught = self._interrupts.take() if self._interrupts is not None else set()
        self._job.stand_still(caught, time.monotonic())
        for action in self._job.outbox.take_quiet():
            self._perform(action)
        if (error := self._job.unread) is not None:
            raise error

    def _close(self) -> list[int]:
        """End the agents and all processes of the job, even if its agents were killed, and close the output. Returns
        the pids of processes that could not be ended."""
        self._agents.close(0.0 if self._job.overdue else HANG_UP_SECONDS)
        stuck = sweep(self._mark)
        self._query.close()
        self._output.close()
        for view in self._views:
            view.close()
        return stuck

    @property
    def _mark(self) -> str:
        """The environment variable with its value that identifies all processes of the job."""
        return f"DADT_JOB={self._folder.job}"

    def _kill(self) -> float:
        return self._job.kill(time.monotonic())

    def _warn(self, text: str) -> None:
        self._voice.say(text, "warning")

    def _perform(self, action: Action) -> None:
        match action:
            case actions.WriteJournal(kind, facts):
                self._report.journal.write(kind, **facts)
            case actions.PrintOutput(rank, stream, data):
                self._output.write(rank, stream, data)
            case actions.EndOutput(rank):
                self._output.end(rank)
            case actions.MoveOutput(rank, host):
                self._output.move(rank, host)
            case actions.WriteStacks(rank, text):
                self._stacks.write(rank, text)
            case actions.AnswerCaller(frame):
                self._query.told(frame)
            case actions.ReachHost(node):
                self._agents.reach(node)
            case actions.GiveUpHost(node):
                self._agents.give_up(node)
            case actions.StartWorkers(node, place):
                self._agents.send(node, order_to_join(self._where, place, self._job.saves))
            case _:
                self._agents.start_up(action, self._voice, partial(look, self._plan, self._folder.job))


def facts_of(the_plan: Plan, job: str, logs: Path, hosts: int) -> dict[str, Any]:
    """Return those facts about a job that do not change while it runs, for other `dadt` commands."""
    return {"job": job, "command": list(the_plan.command), "logs": str(logs.resolve()), "hosts": hosts}
