"""Runs the workers of one host, from their start until no process is left, by carrying out what HostJob decides."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dadt.control import machine, schema, written_files
from dadt.control.condition import Conditions
from dadt.control.frame import Frame
from dadt.control.heartbeat import Heartbeat
from dadt.control.job_folder import Folder
from dadt.control.uptime import uptime
from dadt.errors import LaunchError
from dadt.launch.actions import unknown
from dadt.launch.agent import actions, host_heartbeat
from dadt.launch.agent.actions import AgentAction, FindHandlers, SendBeat
from dadt.launch.agent.dump import Dump, HostInquiry
from dadt.launch.agent.entrances import Entrances
from dadt.launch.agent.host_job import TICK_SECONDS, HostJob
from dadt.launch.agent.launcher_line import LauncherLine
from dadt.launch.agent.lines import Lines
from dadt.launch.agent.probing import Probing
from dadt.launch.agent.registry import Line, Saying
from dadt.launch.agent.start import WorkerStart
from dadt.launch.agent.worker import STREAMS, Worker
from dadt.launch.agent.worker_output import WorkerOutput
from dadt.launch.ending.processes import Process, handles, kill, members, terminate, without_trackers
from dadt.launch.ending.signals import ENDING_SIGNALS, Interrupts

STACK_SECONDS = 0.5
"""Seconds that workers may take to write their stack traces before they are stopped."""
COMMAND_NOT_RUN = 127  # shells exit with this code if a command cannot be run
SHIM_KINDS = ("shim", "spawned", "unspawned", "ended")
"""Kinds of frames that shims send. They are about the worker's process, not about the process that sends them."""


class Supervisor:
    """Runs the workers of one host in a single thread, with one selector for the launcher, signals, and the workers'
    pipes and connections."""

    def __init__(
        self,
        job: Frame,
        launcher: LauncherLine,
        interrupts: Interrupts,
        folder: Folder,
        env: Mapping[str, str],
        stdin: int | None,
        probing: Probing,
    ) -> None:
        """job: the launcher's order to start workers. env: base environment of this host. stdin: descriptor of rank 0's
        standard input. Raises OSError if the folder cannot be written."""
        if job.body:
            folder.function.write_bytes(job.body)
        self._pulse = Heartbeat.create(folder.pulse, len(job["workers"]))
        self._job = job
        self._launcher = launcher
        self._interrupts = interrupts
        self._folder = folder
        self._probing = probing
        self._host = host = HostJob(job, folder.path, time.monotonic())
        self._starts = WorkerStart(job, env, folder.socket, stdin)
        speaker = schema.WORKER.without(*(() if job.body else ("result",)), *(() if job["adopt"] else SHIM_KINDS))
        self._lines = Lines(speaker, launcher, host.registry.connected, self._hear, self._hung_up)
        self._entrances = Entrances(folder, host.ranks, launcher, self._lines.accept, self._lines.drop)
        self._heart = host_heartbeat.listen(job, launcher)
        """Heartbeats to and from the agents of the other hosts; None if the job does not use them or the socket could
        not be created."""
        self._workers: dict[int, Worker] = {}
        """Newest worker of each rank, with the pipes from which its output is read."""
        self._shims: dict[int, Worker] = {}
        """The worker that each shim starts or is about to start, by the number of the shim's connection."""
        self._inquiries: list[HostInquiry] = []
        """The launcher's requests for stack traces that are not answered yet."""
        self._dump: Dump | None = None
        """The request for all workers' stack traces before the workers are stopped; None if there is none at the
        moment."""
        self._output = WorkerOutput(launcher)
        self._conditions = Conditions()
        self._memory_kills = machine.memory_kills()

    def run(self) -> None:
        host, job = self._host, self._job
        self._launcher.watch(self._interrupts.fileno(), self._read_signals)
        try:
            for slot in () if job["adopt"] else job["workers"]:
                self._own(self._starts.worker(slot))
        except LaunchError as error:
            host.unstarted(str(error), time.monotonic())
        while not host.over:
            self._turn()
        self._entrances.close()
        if self._heart is not None:
            self._launcher.forget(self._heart.fileno())
            self._heart.close()
        host.leave()
        self._carry_out()
        self._launcher.take_leave()

    def _turn(self) -> None:
        host = self._host
        self._carry_out()
        self._lines.watch_writes()
        busy = bool(self._inquiries or self._probing.active)
        self._launcher.select(TICK_SECONDS if busy else host.patience)
        orders, self._launcher.orders = self._launcher.orders, []
        for order in orders:
            host.order(order, time.monotonic())
            self._carry_out()
        self._answer_inquiries()
        self._probing.advance()
        for told in self._heart.turn() if self._heart is not None else []:
            self._launcher.send(told)
        self._entrances.tend()
        self._output.balance(self._workers.values())
        steps = {rank: self._pulse.read(local) for rank, local in host.ranks.items()}
        host.turn(time.monotonic(), steps, launcher_gone=self._launcher.gone)
        self._carry_out()
        self._read_dump()
        if host.stopping is not None:
            host.advance_stop(members(self._folder.mark, descendants=True), time.monotonic())
            self._carry_out()

    def _carry_out(self) -> None:
        self._host.outbox.empty(self._perform)

    def _own(self, worker: Worker) -> None:
        """Begin to manage this worker: report its start, read its output, and stop it when necessary."""
        self._workers[worker.rank] = worker
        self._host.started(worker.rank, Process.of(worker.pid))
        self._carry_out()
        self._output.watch(worker)

    def _hear(self, line: Line, frame: Frame) -> None:
        """Handle a frame that a process of this host has sent. Raises DadtError if the process may not send it."""
        known = line.process.pid > 1 and frame.kind not in SHIM_KINDS
        process = line.process if known or "pid" not in frame.header else Process.of(frame["pid"])
        owner = self._host.registry.claims.get(line.rank)
        lives = frame.kind == "claim" and owner is not None and owner.is_alive
        self._host.hear(Saying(line, frame, process, time.monotonic(), lives))
        self._carry_out()

    def _hung_up(self, number: int) -> None:
        self._host.hung_up(number)
        self._carry_out()

    def _read_signals(self) -> None:
        caught = self._interrupts.take()
        if signal.SIGCHLD in caught:
            self._reap()
        if ending := caught & ENDING_SIGNALS:
            self._host.told_to_end(ending, time.monotonic())
            self._carry_out()

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for worker in [each for each in self._workers.values() if each.pid == pid]:
                worker.end(status)
                self._report_end(worker, usage.ru_maxrss * 1024)

    def _report_end(self, worker: Worker, peak_memory: int) -> None:
        """Report a worker's end, after everything that the worker has reported and printed before was sent."""
        self._lines.read_all()
        self._output.drain(worker)
        for failure in self._starts.failures(worker, self._host.registry.failed):
            self._launcher.send(failure)
        self._tell_end(worker.rank, worker.returncode, peak_memory)

    def _tell_end(self, rank: int, code: int, peak_memory: int) -> None:
        step, _ = self._pulse.read(self._host.ranks[rank])
        memory = machine.memory_facts(peak_memory, self._memory_kills)
        self._host.ended(rank, code, {"step": step, "time": uptime(), **memory})
        self._carry_out()

    def _beat(self, action: SendBeat) -> None:
        steps = {str(rank): step for rank, step in action.steps.items()}
        memory = {str(rank): machine.resident(pid) for rank, pid in action.pids.items()}
        conditions = self._conditions.look({rank: action.pids[rank] for rank in action.still})
        told = {"steps": steps, "memory": memory, "conditions": conditions, "clock": uptime()}
        self._launcher.send(Frame("beat", told))

    def _read_dump(self) -> None:
        """Read the stack traces that workers have written before they are stopped, and pass them to HostJob once they
        are complete."""
        if self._dump is not None:
            self._dump.advance()
            if self._dump.complete:
                stacks, self._dump = self._dump.stacks, None
                self._host.dumped(stacks)
                self._carry_out()

    def _answer_inquiries(self) -> None:
        for inquiry in list(self._inquiries):
            if answers := inquiry.advance():
                self._inquiries.remove(inquiry)
                for answer in answers:
                    self._launcher.send(answer)

    def _perform(self, action: AgentAction) -> None:
        match action:
            case actions.TellLauncher(frame):
                self._launcher.send(frame)
            case actions.AnswerLine(line, frame):
                if not self._lines.answer(line, frame):
                    self._host.unsent(line, frame)
            case actions.StartAnew(rank):
                self._start_anew(rank)
            case actions.AdmitShim(line, rank):
                self._admit(line, rank)
            case actions.OwnWorker(line, pid):
                self._shims[line].pid = pid
                self._own(self._shims[line])
            case actions.EndWorker(line, status, peak_memory):
                worker = self._shims.pop(line)
                worker.end(status)
                self._report_end(worker, peak_memory)
            case actions.SignalGroup(rank, number):
                self._workers[rank].signal(number)
            case actions.SignalProcess(process, number):
                process.signal(number)
            case actions.FindHandlers():
                self._find_handlers(action)
            case actions.GatherStacks(number, ranks):
                self._inquiries.append(HostInquiry(number, ranks, self._host.registry.dumps))
            case actions.DumpStacks():
                self._dump = Dump(self._host.registry.dumps, STACK_SECONDS)
            case actions.SendBeat():
                self._beat(action)
            case actions.TerminateAll(left):
                self._terminate(left)
            case actions.KillAll(left, spares_trackers):
                kill(without_trackers(left) if spares_trackers else left, signal.SIGKILL)
            case actions.ResetStep(rank):
                self._pulse.write(self._host.ranks[rank], -1)
            case actions.RemoveHalves(folder, mark):
                with suppress(OSError):  # removing the files may fail, for example on a broken file system
                    for half in Path(folder).glob(f"{mark}*"):
                        shutil.rmtree(half, ignore_errors=True)
            case actions.NoteWritten(rank, size, path):
                written_files.add(self._folder.path, rank, size, path)
            case actions.HearHosts(hosts):
                if self._heart is not None:
                    self._heart.begin(hosts)
            case actions.ProbeHosts(order):
                self._probing.begin(order)
            case _:
                unknown(action)

    def _start_anew(self, rank: int) -> None:
        self._pulse.write(self._host.ranks[rank], -1)
        try:
            self._own(self._starts.anew(rank))
        except LaunchError:
            self._tell_end(rank, COMMAND_NOT_RUN, 0)

    def _admit(self, line: int, rank: int) -> None:
        """Send a shim the order to start its worker. The worker's output comes through named pipes, which the shim
        opens for writing."""
        paths = {stream: self._folder.path / f"{rank}.{stream}" for stream in STREAMS}
        descriptors = []
        for path in paths.values():
            os.mkfifo(path, 0o600)
            # The selector does not watch the pipe before the shim has opened it, since a pipe without a writer reads as
            # ended.
            descriptors.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        self._shims[line] = Worker(rank, 0, *descriptors)
        order = self._starts.order(rank) | {stream: str(path) for stream, path in paths.items()}
        self._lines.answer(line, Frame("order", order))

    def _find_handlers(self, action: FindHandlers) -> None:
        living = {rank: process for rank, process in action.processes.items() if process.is_alive}
        heedless = [rank for rank, process in living.items() if not handles(process.pid, action.number)]
        self._host.save(action, living, heedless)

    def _terminate(self, left: Sequence[int]) -> None:
        for worker in self._workers.values():
            worker.signal(signal.SIGTERM)
        groups = {worker.pid for worker in self._workers.values() if not worker.ended}
        terminate(left, groups)
