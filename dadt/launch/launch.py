"""Runs a planned job and returns its outcome, for both the command line and `dadt.run`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from dadt.config import Config
from dadt.config.executor import executors_of
from dadt.control import private_files, timeline_file
from dadt.control.job_folder import Folder
from dadt.errors import ConfigError, DadtError, LaunchError
from dadt.launch.actions import SayText
from dadt.launch.attempt import Attempt, facts_of
from dadt.launch.channel import AgentRequest, Herald, Launcher
from dadt.launch.ending.failure import signal_name
from dadt.launch.ending.outcome import Outcome
from dadt.launch.ending.restart import NoteRestart, Restarts
from dadt.launch.ending.signals import ENDING_SIGNALS, Interrupts, forwarded, of_checkpoint
from dadt.launch.hosts.discovery import Discovery
from dadt.launch.hosts.host import Host
from dadt.launch.hosts.reader import HostReader
from dadt.launch.idle import Idle
from dadt.launch.launchers import launcher_of
from dadt.launch.monitor import metrics
from dadt.launch.monitor.metrics import Export
from dadt.launch.monitor.series import Series
from dadt.launch.monitor.watch import View, Watch
from dadt.launch.report import JobReport
from dadt.launch.start import plan, resume, saved_start
from dadt.launch.start.placement import Placed
from dadt.launch.start.plan import Plan
from dadt.launch.start.startup import Voice

LOOK_SECONDS = 0.1
"""Seconds between two checks whether there are enough hosts, while a job waits for them."""
SERIES = "progress.jsonl"

Told = Callable[[Placed, Watch], View | None]
"""Function that is called once every worker has its place. Returns the view that displays the job, or None for no
display."""


def run(the_plan: Plan, voice: Voice, placed: Told, signals: bool = True) -> Outcome:
    """Start the job and wait for its end. placed: called once every worker has its place. signals: whether to handle
    the process's signals, which only the main thread can.

    Raises DadtError if nothing could be started.
    """
    exports: Sequence[Export] = ()
    try:
        if the_plan.timeline:
            timeline_file.prepare(the_plan.timeline)
        exports = metrics.prepare(the_plan.config.metrics)
        return Launch(the_plan, voice, placed, signals, exports).run()
    finally:
        for export in exports:
            export.close()
        plan.release(the_plan)


class Launch:
    """Runs a job, with further attempts after failures if the user allows them, and writes the report about it in the
    job's log folder."""

    def __init__(self, the_plan: Plan, voice: Voice, placed: Told, signals: bool, exports: Sequence[Export]) -> None:
        """Reserve the job's id and folder. exports: where the first attempt to run the job sends its metrics."""
        self._plan = the_plan
        self._voice = voice
        self._placed = placed
        self._exports = exports
        config = the_plan.config
        self._folder = reserve(Path(config.log_dir))
        self._logs = Path(config.log_dir) / self._folder.job
        taken = {*ENDING_SIGNALS, *forwarded(config), of_checkpoint(config)} - {0}
        self._interrupts = Interrupts(sorted(taken)) if signals else None
        self._report = JobReport(the_plan, self._logs, self._warn)
        self._launcher: Launcher | None = None
        self._reached: Config | None = None
        """The configuration of the latest attempt to run the job; None before the first."""

    def run(self) -> Outcome:
        """Run the job and return its outcome. Raises DadtError if nothing could be started."""
        if self._plan.start is not None:
            try:
                saved_start.write(self._logs, self._plan.start)
            except OSError as error:
                self._warn(f"--resume will need the script once more: {saved_start.FILE} ({error.strerror})")
        try:
            outcome = self._attempts()
            self._report.ended(outcome)
            self._conclude(outcome.exit_code, _verdict(outcome))
            return outcome
        except DadtError as error:
            self._report.failed(error)
            raise
        finally:
            self._folder.remove()
            self._report.close()

    def _attempts(self) -> Outcome:
        """Run attempts until one succeeds or no further restart is allowed. Returns the outcome of the last one."""
        config, hosts = self._plan.config, self._plan.hosts
        read = plan.who_names_hosts(config, hosts)
        discovery = Discovery(hosts, time.monotonic(), changes=read is not None)
        self._candidates, self._reader = discovery.candidates, HostReader(discovery, read, self._warn)
        self._restarts = Restarts(config, discovery)
        with self._interrupts or nullcontext():
            try:
                outcome = self._run()
                outcome.remember(self._resuming())
                return outcome
            except DadtError as error:
                if self._report.began and not isinstance(error, ConfigError) and (command := self._resuming()):
                    error.args = (f"{error}; go on with: {command}",)
                self._conclude(error.exit_code, [str(error)])
                raise

    def _run(self) -> Outcome:
        """Run the attempts that `Restarts` decides on, and return the outcome of the last one. Raises DadtError."""
        restarts = self._restarts
        while True:
            hosts = self._await_hosts()
            try:
                outcome = self._attempt(restarts.count, hosts)
                again = restarts.ended(outcome)
            except DadtError as error:
                again = restarts.failed(error, hosts, time.monotonic(), began=self._report.began)
                if not again:
                    raise
            finally:
                restarts.outbox.empty(self._perform)
            if not again:
                return outcome

    def _await_hosts(self) -> Sequence[Host]:
        """Return the hosts for the next attempt once there are enough. Until then, answer other `dadt` commands. Raises
        DadtError if there are still too few after the timeout, or if the user ends the job."""
        restarts, idle = self._restarts, None
        with ExitStack() as stack:
            while True:
                self._reader.poll(restarts.ask_seconds(time.monotonic()))
                hosts = restarts.hosts(time.monotonic())
                restarts.outbox.empty(self._perform)
                if hosts is not None:
                    return hosts
                idle = idle or stack.enter_context(self._idle())
                idle.wait(LOOK_SECONDS)
                if idle.is_killed:
                    restarts.kill()

    def _idle(self) -> Idle:
        interrupts, restarts = self._interrupts, self._restarts
        idle = Idle(self._folder, facts_of(self._plan, self._folder.job, self._logs, 0), self._report.journal.refused)
        if interrupts is not None:
            idle.watch(interrupts, lambda: restarts.signal(interrupts.take()))
        return idle

    def _perform(self, action: SayText | NoteRestart) -> None:
        match action:
            case SayText(text, level):
                self._voice.say(text, level)
            case NoteRestart(number, why):
                self._report.restarts(number, why)
                with suppress(OSError):  # if renaming fails, the next attempt overwrites the file
                    (self._logs / SERIES).rename(self._logs / f"progress.{number - 1}.jsonl")

    def _attempt(self, number: int, hosts: Sequence[Host]) -> Outcome:
        """Run one attempt. number: number of restarts before it. Raises DadtError."""
        config, journal = replace(self._plan.config, island=self._restarts.island), self._report.journal
        exports = metrics.prepare(config.metrics) if number else self._exports
        try:
            request = AgentRequest(
                config, hosts, self._plan.command, self._folder.job, journal.refused, self._voice.say
            )
            self._launcher = launcher_of(request)
            self._reached = resume.configured(config, self._logs, len(hosts), number, self._restarts.refused)
            return Attempt(
                replace(self._plan, hosts=hosts, config=self._reached, divisors=dict(self._restarts.divisors)),
                self._launcher,
                self._folder,
                self._voice,
                partial(self._views, exports),
                self._report,
                self._interrupts,
                number,
                self._candidates,
                self._reader,
            ).run()
        finally:
            for export in exports:
                export.close()

    def _views(self, exports: Sequence[Export], where: Placed, watch: Watch) -> list[View]:
        """Return all views of the job: the recorder of `progress.jsonl`, the exports of metrics, and the display."""
        view = self._placed(where, watch)
        for export in exports:
            self._voice.say(export.begin(watch, _labels(where), self._warn))
        series = Series(where.logs / SERIES, watch, self._warn)
        return [series, *exports, *([view] if view is not None else [])]

    def _resuming(self) -> str:
        """Return the command that resumes the job; empty if the job cannot be resumed."""
        reached = self._reached
        return saved_start.command(self._logs, reached.snapshot_dir, reached.resume) if reached is not None else ""

    def _conclude(self, code: int, lines: Sequence[str]) -> None:
        """Report the end of the job to its hosts, if the launcher has a way to do so (see `Herald`)."""
        launcher: object = self._launcher
        if isinstance(launcher, Herald):
            launcher.conclude(code, lines)

    def _warn(self, text: str) -> None:
        self._voice.say(text, "warning")


def reserve(log_dir: Path) -> Folder:
    """Reserve an id for the job, and create its log folder. Returns the job's folder in /tmp. Raises ConfigError or
    LaunchError."""
    try:
        private_files.make_folder(log_dir)
    except OSError as error:
        raise ConfigError(f"--log-dir {log_dir}: cannot be written ({error.strerror}); give another") from error
    try:
        folder = Folder.reserve(log_dir)
    except OSError as error:
        why = "running jobs need it"
        raise LaunchError(f"{error.filename or 'a file'}: cannot be written ({error.strerror}); {why}") from error
    try:
        private_files.make_inner_folder(log_dir / folder.job)
    except OSError as error:
        folder.remove()
        raise ConfigError(f"--log-dir {log_dir}: cannot be written ({error.strerror}); give another") from error
    return folder


def not_distributed(outcome: Outcome, where: Placed) -> str | None:
    """Return why training was not distributed although the job succeeded; None if it was distributed, or if there was
    one worker only."""
    if len(where.slots) < 2:
        return None
    if not outcome.hooked and where.config.inject == "none":
        return "--inject none left every worker to itself"
    if not outcome.hooked:
        return (
            "no worker imported torch with DADT hooked in (does the script import torch, in a Python in which dadt "
            "is installed? try --inject sitecustomize)"
        )
    # A script that calls dadt.init (summary "explicit") may use its ranks without an optimizer.
    told = any(summary.get("steps", 0) or summary.get("explicit") for summary in outcome.summaries.values())
    if not (told or outcome.stepped):
        return (
            "no torch.optim optimizer made a step in any worker, so nothing was averaged "
            "(an optimizer that is not a torch.optim.Optimizer, or training in a child process?)"
        )
    return None


def _labels(where: Placed) -> dict[str, str]:
    """Return the labels that identify the job in exported metrics."""
    config = where.config
    executor = executors_of(config)[1]
    chosen = {"algorithm": config.algorithm, "executor": executor, "compression": config.compression}
    return {"job": where.job, **chosen, "workers": str(len(where.slots))}


def _verdict(outcome: Outcome) -> list[str]:
    if outcome.signal:
        return [f"ended by {signal_name(outcome.signal)}"]
    if outcome.preemption is not None:
        return [outcome.preemption.text]
    return outcome.failure.lines() if outcome.failure is not None else [f"done in {outcome.seconds:.1f} s"]
