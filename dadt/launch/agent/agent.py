"""The agent: the one process per host that owns the host's workers.

It reports what the host has, starts the workers that the launcher orders, and forwards their output and reports. It
ends them when the launcher says so, when its input closes or falls silent (the launcher is gone), or on a signal. It
makes no other decisions.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from functools import partial
from typing import Any

from dadt.control import machine, mpi_library, network, schema
from dadt.control.accept import MOST_AT_ONCE, Entrance
from dadt.control.condition import STILL_SECONDS, Conditions
from dadt.control.frame import Frame, Link
from dadt.control.heartbeat import Heartbeat
from dadt.control.job_folder import Folder
from dadt.errors import DadtError, LaunchError
from dadt.launch import environment
from dadt.launch.agent import adoption, host_heartbeat
from dadt.launch.agent.checkpoint_signal import CheckpointSignal
from dadt.launch.agent.entrances import Entrances
from dadt.launch.agent.host_heartbeat import HostHeartbeat
from dadt.launch.agent.interruption import interrupt
from dadt.launch.agent.launcher_line import TURN_SECONDS, LauncherLine
from dadt.launch.agent.probing import Probing
from dadt.launch.agent.registry import SHIMS, Line, WorkerRegistry
from dadt.launch.agent.start import Start
from dadt.launch.agent.stop import Stop
from dadt.launch.agent.worker import Worker
from dadt.launch.agent.worker_output import WorkerOutput
from dadt.launch.processes import Process, sweep
from dadt.launch.signals import ENDING_SIGNALS, Interrupts

TICK_SECONDS = 0.05
PROBE_TICK_SECONDS = 0.01
ADDRESS_SECONDS = 3.0
"""How long a host without an address may take to get one."""
NATURAL_SECONDS = 0.5
"""How long processes left by successful workers may take to end by themselves."""
COMMAND_NOT_RUN = 127  # as shells say for a command that cannot be run


class Agent:
    """Single-threaded, with one selector for the launcher, signals, and the workers' pipes and control lines."""

    def __init__(self, launcher: Link, interrupts: Interrupts, stdin: int | None = None, folder: str = "") -> None:
        """stdin: what rank 0 reads. folder: in which workers start, if not in the one that the launcher names."""
        self._differs = {"cwd": folder} if folder else {}
        self._launcher = LauncherLine(launcher)
        self._interrupts = interrupts
        self._stdin = stdin
        self._workers: dict[int, Worker] = {}
        self._pids: dict[int, Worker] = {}
        self._stop: Stop | None = None
        self._output = WorkerOutput(self._launcher)
        self._conditions = Conditions()
        self._heart: HostHeartbeat | None = None
        """Checks that data from the other hosts come through."""
        self._ranks: dict[int, int] = {}
        """Rank to local rank."""
        self._heartbeat = 0.0
        self._checkpoint: CheckpointSignal | None = None
        """Its script saves when it is asked to, so that this host can be preempted."""
        self._preempted = False
        self._probing = Probing(self._launcher.send)
        self._signal = 0
        """The number of the signal by which this process was asked to end; 0: none."""

    def run(self) -> None:
        self._launcher.watch(self._interrupts.fileno(), self._read_signals)
        look = self._await_order("look")
        if look is None:
            return
        self._folder = Folder.join(f"{look['job']}.{look['index']}", guarded=True)
        try:
            self._launcher.patience = look["orphan_timeout"] or float("inf")
            job = self._await_job(look)
            if job is not None:
                self._serve(job)
        finally:
            sweep(self._folder.mark)  # the prologue may still run, or have left processes
            self._folder.remove()

    def _await_job(self, look: Frame) -> Frame | None:
        """Report what the host has, probe the other hosts, and wait for the order to start workers."""
        token = os.urandom(network.TOKEN_BYTES)
        listener = network.Listener(token) if look["hosts"] > 1 else None
        try:
            self._env: dict[str, str] = {}
            problems = environment.missing(look["cwd"], look["files"])
            if not problems:
                self._env, problems = environment.base(look["env"], look["prologue"], self._folder.mark, look["cwd"])
            if look.get("mpi") and not problems:
                problems = mpi_library.missing(self._env, self._folder.path)
            report = machine.report(self._env) | {"problems": [text[: schema.TEXT] for text in problems[:100]]}
            if listener is not None:
                report["addresses"] = self._await_address()
                self._launcher.watch(listener.fileno(), listener.answer)
                report |= {"probe_port": listener.port, "token": token.hex()}
                report["marker"] = None if problems else self._probing.mark(look["cwd"], look["job"]) or None
            self._launcher.send(Frame("ready", report | {"clock": time.time()}))
            while (order := self._await_order("probe", "job")) is not None and order.kind == "probe":
                self._probing.begin(order)
                while self._probing.active and not self._launcher.gone:
                    self._launcher.select(PROBE_TICK_SECONDS)
                    self._probing.advance()
            return order
        finally:
            self._probing.unmark()
            if listener is not None:
                self._launcher.forget(listener.fileno())
                listener.close()

    def _await_address(self) -> list[dict[str, Any]]:
        """Wait for an address, which a machine that has just booted may not have yet."""
        deadline = time.monotonic() + ADDRESS_SECONDS
        while not (found := network.addresses()) and time.monotonic() < deadline:
            self._launcher.select(PROBE_TICK_SECONDS)
            self._beat()
        return found

    def _await_order(self, *kinds: str) -> Frame | None:
        """The next order of these kinds; None if the launcher is gone or a signal came."""
        while not self._launcher.gone and not self._signal:
            self._launcher.select(TURN_SECONDS)
            self._beat()
            orders, self._launcher.orders = self._launcher.orders, []
            for place, order in enumerate(orders):
                if order.kind in kinds:
                    self._launcher.orders = orders[place + 1 :]
                    order.header.update(self._differs)
                    return order
        return None

    def _serve(self, job: Frame) -> None:
        self._ranks = {worker["rank"]: worker["local_rank"] for worker in job["workers"]}
        self._checkpoint = CheckpointSignal(**job["checkpoint"]) if "checkpoint" in job.header else None
        try:
            if job.body:
                self._folder.function.write_bytes(job.body)
            self._pulse = Heartbeat.create(self._folder.pulse, len(self._ranks))
        except OSError as error:
            self._launcher.send(
                Frame("unstarted", {"message": f"{self._folder.path}: cannot be written ({error.strerror})"})
            )
            self._launcher.send(Frame("end", {"stuck": [], "signal": self._signal}))
            self._launcher.take_leave()
            return
        speaker = schema.WORKER.without(*(() if job.body else ("result",)), *(() if job["adopt"] else SHIMS))
        secret, number = bytes.fromhex(job["secret"]), self._checkpoint.number if self._checkpoint else 0
        self._roster = WorkerRegistry(
            self._folder.socket, self._ranks, self._pulse, self._hear, speaker, secret, number
        )
        self._adoption = adoption.ShimAdmission(self._folder.path, self._roster.answer)
        self._memory_kills = machine.memory_kills()
        self._entrances = Entrances(self._folder, self._ranks, self._launcher, self._accept, self._drop)
        self._heart = host_heartbeat.listen(job, self._launcher)
        try:
            self._start(job)
        except LaunchError as error:
            self._fail_to_start(str(error))
        while not self._is_over():
            self._turn()
        self._entrances.close()
        if self._heart is not None:
            self._launcher.forget(self._heart.fileno())
            self._heart.close()
        self._launcher.send(Frame("end", {"stuck": self._stop.stuck if self._stop else [], "signal": self._signal}))
        self._launcher.take_leave()

    def _start(self, job: Frame) -> None:
        self._starts = Start(job, self._env, self._folder.socket, self._stdin)
        for slot in job["workers"]:
            if job["adopt"]:
                self._adoption.expect(slot["rank"], self._starts.order(slot), job["adopt"])
            else:
                self._own(self._starts.worker(slot))

    def _start_anew(self, rank: int) -> None:
        self._pulse.write(self._ranks[rank], -1)
        try:
            self._own(self._starts.anew(rank))
        except LaunchError:
            self._tell_end(rank, COMMAND_NOT_RUN, 0)

    def _own(self, worker: Worker) -> None:
        """Begin to read, report and later stop this worker."""
        self._workers[worker.rank] = worker
        self._pids[worker.pid] = worker
        self._launcher.send(Frame("started", {"rank": worker.rank, "pid": worker.pid}))
        self._output.watch(worker)

    def _hear(self, frame: Frame) -> None:
        """Handle a frame of a process of this host that is not for the registry."""
        if frame.kind == "shim":
            self._adoption.admit(frame)
        elif frame.kind == "spawned" and (worker := self._adoption.spawned(frame)) is not None:
            self._own(worker)
        elif frame.kind == "ended" and (ended := self._adoption.ended(frame)) is not None:
            self._report_end(*ended)
        elif frame.kind == "unspawned" and self._adoption.admitted(frame["line"]):
            self._fail_to_start(frame["message"])
        elif frame.kind not in SHIMS:
            self._launcher.send(frame)

    def _fail_to_start(self, why: str) -> None:
        self._launcher.send(Frame("unstarted", {"message": why[: schema.TEXT]}))
        self._begin_stop(Frame("stop"))

    def _is_over(self) -> bool:
        """Whether all workers have ended and were reported, or cannot be killed."""
        stop = self._stop
        return stop is not None and stop.finished and (bool(stop.stuck) or self._all_ended())

    def _all_ended(self) -> bool:
        return not self._adoption.pending and all(worker.ended for worker in self._workers.values())

    def _turn(self) -> None:
        for line in self._roster.lines.values():
            self._watch_line(line)
        self._launcher.select(TICK_SECONDS if self._needs_tick() else TURN_SECONDS)
        for order in self._launcher.orders:
            self._obey(order)
        self._launcher.orders.clear()
        self._roster.settle()
        self._probing.advance()
        for told in self._heart.turn() if self._heart is not None else []:
            self._launcher.send(told)
        self._beat()
        self._entrances.tend()
        self._output.balance(self._workers.values())
        if self._launcher.gone and (self._stop is None or self._stop.natural):
            self._begin_stop(Frame("stop"))
        elif self._stop is None and (missing := self._adoption.missing()):
            self._fail_to_start(missing)
        elif self._stop is None and self._all_ended() and not self._starts.job.get("stays"):
            self._begin_stop(Frame("stop", {"natural": NATURAL_SECONDS}))
        if self._stop and not self._stop.finished:
            if self._all_ended():
                self._stop.end_naturally_in(NATURAL_SECONDS)
            for rank, pid, text in self._stop.advance():
                self._launcher.send(Frame("stacks", {"rank": rank, "pid": pid}, text))

    def _needs_tick(self) -> bool:
        return bool(self._stop or self._roster.is_waited_for or self._probing.active)

    def _obey(self, order: Frame) -> None:
        if order.kind == "stop":
            self._begin_stop(order)
        elif order.kind == "interrupt" and self._stop is None:
            interrupt(self._workers.values(), self._roster, order["grace"])
            self._begin_stop(Frame("stop", {"natural": order["grace"], "grace": order["grace"]}))
        elif order.kind == "preempt":
            self._preempt(together=order.get("together", True))
        elif order.kind == "answer":
            answer = order["answer"]
            self._roster.answer(order["line"], Frame(answer.pop("kind"), answer, order.body))
        elif order.kind == "stacks":
            self._roster.inquire(order["number"], [rank for rank in order["ranks"] if rank in self._ranks])
        elif order.kind == "heartbeat" and self._heart is not None:
            self._heart.begin(order["hosts"])
        elif order.kind == "probe":
            self._probing.begin(order)
        elif order.kind in ("death", "regroup", "approach", "wrote"):
            self._roster.tell(order)
        elif order.kind == "worker" and order["rank"] in self._ranks and self._stop is None:
            self._start_anew(order["rank"])
        elif order.kind == "signal" and "rank" not in order.header and self._is_for_saving(order["number"]):
            self._save()
        elif order.kind == "signal":
            for worker in self._workers.values():
                if order.get("rank", worker.rank) == worker.rank:
                    worker.signal(order["number"])

    def _is_for_saving(self, number: int) -> bool:
        return self._checkpoint is not None and self._checkpoint.number == number

    def _save(self, *, together: bool = True) -> None:
        """Have the workers save a checkpoint."""
        assert self._checkpoint is not None
        trains = self._roster.claims
        of_ranks = {rank: trains.get(rank, Process.of(each.pid)) for rank, each in self._workers.items()}
        if heedless := self._checkpoint.send(of_ranks, self._roster.tell_to_save, together=together):
            self._launcher.send(Frame("unheeded", {"number": self._checkpoint.number, "ranks": heedless}))

    def _preempt(self, *, together: bool) -> None:
        """Have the workers save, and stop those that have not ended by themselves in time. Idempotent."""
        if self._checkpoint is None or self._preempted or self._stop is not None:
            return
        self._preempted = True
        self._roster.tell(Frame("preempted"))
        self._save(together=together)
        self._begin_stop(Frame("stop", {"natural": self._checkpoint.grace, "grace": self._checkpoint.grace}))

    def _begin_stop(self, order: Frame) -> None:
        """Begin to stop the workers. A later order may only hasten the end."""
        self._adoption.dismiss()
        living = [worker for worker in self._workers.values() if not worker.ended]
        dumps = self._roster.dumps if order.get("stacks") else {}
        stop = Stop(self._folder.mark, living, dumps, order.get("natural", 0.0), order.get("grace", 1.5))
        if self._stop is None or self._stop.natural:
            self._stop = stop
        else:
            self._stop.hasten(order.get("grace", 1.5))

    def _read_signals(self) -> None:
        caught = self._interrupts.take()
        if signal.SIGCHLD in caught:
            self._reap()
        ending = caught & ENDING_SIGNALS
        if ending == {signal.SIGTERM} and self._checkpoint is not None and (self._stop is None or self._preempted):
            self._launcher.send(Frame("preempted"))
            self._launcher.orders.append(Frame("preempt", {"together": not self._checkpoint.alone}))
        elif ending:
            self._signal = min(ending)
            self._launcher.orders.append(Frame("stop"))

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            worker = self._pids.get(pid)
            if worker is not None:
                worker.end(status)
                self._report_end(worker, usage.ru_maxrss * 1024)

    def _report_end(self, worker: Worker, peak_memory: int) -> None:
        """Report a worker's end, after everything that it said and printed."""
        for line in list(self._roster.lines.values()):
            self._read_line(line)
        self._output.drain(worker)
        for failure in self._starts.failures(worker, self._roster.failed):
            self._launcher.send(failure)
        self._tell_end(worker.rank, worker.returncode, peak_memory)

    def _tell_end(self, rank: int, code: int, peak_memory: int) -> None:
        step, _ = self._pulse.read(self._ranks[rank])
        stopped = self._stop is not None and self._stop.signalled
        facts = {"rank": rank, "code": code, "step": step, "stopped": stopped, "time": time.time()}
        self._launcher.send(Frame("exit", {**facts, **machine.memory_facts(peak_memory, self._memory_kills)}))
        self._roster.ended(rank, code)

    def _accept(self, rank: int, entrance: Entrance) -> None:
        for _ in range(MOST_AT_ONCE):
            if (line := self._roster.accept(rank, entrance)) is None:
                return
            self._launcher.watch(line.link.reader, partial(self._read_line, line))

    def _drop(self, connection: socket.socket) -> None:
        """Close an unproved connection to make room for others."""
        for line in list(self._roster.lines.values()):
            if line.socket is connection:
                self._hang_up(line)

    def _read_line(self, line: Line) -> None:
        if line.number not in self._roster.lines:
            return  # closed since the selector reported it
        try:
            self._roster.receive(line)
        except EOFError:
            self._hang_up(line)
        except DadtError as error:
            self._launcher.send(Frame("refused", {"rank": line.rank, "why": str(error)[: schema.TEXT]}))
            self._hang_up(line)

    def _hang_up(self, line: Line) -> None:
        self._launcher.selector.unregister(line.link.reader)
        self._roster.hang_up(line)
        if (worker := self._adoption.hung_up(line.number)) is not None:
            self._report_end(worker, 0)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._heartbeat >= TURN_SECONDS:
            self._heartbeat = now
            steps = {str(rank): self._pulse.read(local) for rank, local in self._ranks.items()}
            living = [worker for worker in self._workers.values() if not worker.ended]
            pids = {worker.rank: self._roster.pid_of(worker) for worker in living}
            memory = {str(rank): machine.resident(pid) for rank, pid in pids.items()}
            still = {rank: pid for rank, pid in pids.items() if steps[str(rank)][1] > STILL_SECONDS}
            told = {"steps": steps, "memory": memory, "conditions": self._conditions.look(still), "clock": time.time()}
            self._launcher.send(Frame("beat", told))

    def _watch_line(self, line: Line) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.link.unsent else 0)
        key = self._launcher.selector.get_key(line.link.reader)
        if key.events != events:
            self._launcher.selector.modify(line.link.reader, events, key.data)
