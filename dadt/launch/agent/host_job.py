"""Decides for an agent about its host's part of a job, until all workers on the host have ended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM
from typing import Any

from dadt.control import schema
from dadt.control.condition import STILL_SECONDS
from dadt.control.frame import Frame
from dadt.launch.agent.actions import (
    AgentOutbox,
    DumpStacks,
    FindHandlers,
    GatherStacks,
    HearHosts,
    ProbeHosts,
    SendBeat,
    SignalGroup,
    SignalProcess,
    StartAnew,
    TellLauncher,
)
from dadt.launch.agent.registry import Saying, WorkerRegistry
from dadt.launch.agent.shims import Shims
from dadt.launch.agent.stop import Stop
from dadt.launch.ending.processes import NATURAL_SECONDS, Process

TURN_SECONDS = 0.5
"""Largest number of seconds between two calls of `HostJob.turn`; also the time between two heartbeats to the
launcher."""
TICK_SECONDS = 0.05
"""Largest number of seconds between two calls of `HostJob.turn` while workers are being stopped or a rank waits for a
file."""
DEFAULT_GRACE = 1.5
"""Seconds from SIGTERM to SIGKILL, unless the launcher's order specifies another number."""
MOST_PATIENCE = 5.0
"""Largest number of seconds that ranks may take to agree on the step after which all of them save or are interrupted;
after this time each does so at once."""


@dataclass(slots=True)
class Running:
    """Process of a worker that was started."""

    process: Process
    ended: bool = False


class HostJob:
    """Decides about one host's part of a job: passes each event to the object that handles it, and puts the resulting
    actions into `outbox`."""

    def __init__(self, job: Frame, folder: Path, now: float) -> None:
        """job: the launcher's order to start workers. folder: folder of the job on this host."""
        self.outbox = AgentOutbox()
        self.ranks: Mapping[int, int] = {worker["rank"]: worker["local_rank"] for worker in job["workers"]}
        self._stays = job.get("stays", False)
        self._checkpoint: Mapping[str, Any] | None = job.get("checkpoint")
        """How scripts save when this host is preempted: `number` of the signal that asks them to save, `grace` (seconds
        that saving may take), `alone` (whether workers of other hosts continue training and do not save), `island` (how
        many ranks an island has; 1 without islands), and `saves` (how often all ranks were asked to save before). None
        if scripts cannot save."""
        self._preempted = False
        self._saves: int = self._checkpoint["saves"] if self._checkpoint else 0
        """Number of orders to save that the launcher has given to all ranks."""
        secret, number = bytes.fromhex(job["secret"]), self._checkpoint["number"] if self._checkpoint else 0
        self.registry = WorkerRegistry(folder, self.ranks, secret, number, self._saves, self.outbox)
        self._shims = Shims(self.ranks if job["adopt"] else (), job["adopt"], self.outbox, now)
        self.workers: dict[int, Running] = {}
        self.stop: Stop | None = None
        self._dumps = False
        """Whether workers still write their stack traces, so that they must not be stopped yet."""
        self._beat_at = now
        self.signal = 0
        """Number of the signal that asked this agent to end; 0: none."""
        self.orders: Mapping[str, Callable[[Frame, float], None]] = {
            "stop": self._begin_stop,
            "interrupt": self._interrupt,
            "preempt": lambda _, now: self._save_and_stop(now, together=True),
            "signal": self._signal,
            "worker": self._start_anew,
            "answer": self._answer,
            "death": lambda order, _: self.registry.tell(order),
            "regroup": lambda order, _: self.registry.tell(order),
            "approach": lambda order, _: self.registry.tell(order),
            "proposal": lambda order, _: self.registry.tell(order),
            "wrote": self.registry.wrote,
            "stacks": self._gather_stacks,
            "heartbeat": lambda order, _: self.outbox.put(HearHosts(order["hosts"])),
            "probe": lambda order, _: self.outbox.put(ProbeHosts(order)),
            "beat": lambda _, __: None,  # the launcher's heartbeat only shows that the launcher is alive
        }
        """Handler for each kind of order that the launcher may send while workers run."""
        self._shim_routes: Mapping[str, Callable[[Saying], None]] = {
            "shim": self._shims.shim,
            "spawned": self._shims.spawned,
            "unspawned": self._unspawned,
            "ended": self._shim_ended,
        }

    def order(self, frame: Frame, now: float) -> None:
        """Handle an order that the launcher has sent."""
        self.orders[frame.kind](frame, now)

    def hear(self, saying: Saying) -> None:
        """Handle a frame that a worker's process has sent. Raises DadtError if the process may not send it."""
        self._shim_routes.get(saying.frame.kind, self.registry.hear)(saying)

    def hung_up(self, line: int) -> None:
        """Handle the end of a worker's connection, by whichever side it was closed."""
        self.registry.hung_up(line)
        self._shims.ended(line, SIGKILL, 0)  # a shim that was killed has taken its worker with it

    def unsent(self, line: int, frame: Frame) -> None:
        """Handle a frame that could not be sent on this connection. If it asks the process to raise a signal after a
        step, the process gets the signal at once instead."""
        numbers = {"interrupt": int(SIGINT), "save": self._checkpoint["number"] if self._checkpoint else 0}
        asked = self.registry.lines.get(line)
        if frame.kind in numbers and asked is not None:
            self.outbox.put(SignalProcess(asked.process, numbers[frame.kind]))

    def started(self, rank: int, process: Process) -> None:
        """Record that a worker's process was started, and report this to the launcher."""
        self.workers[rank] = Running(process)
        self.outbox.tell("started", rank=rank, pid=process.pid)

    def unstarted(self, why: str, now: float) -> None:
        """Report to the launcher that a worker could not be started, and stop all other workers."""
        self.outbox.tell("unstarted", message=why[: schema.TEXT])
        self._begin_stop(Frame("stop"), now)

    def ended(self, rank: int, code: int, facts: Mapping[str, Any]) -> None:
        """Record that a worker has ended, and report this to the launcher. facts: the worker's last step, the time of
        its end, and its use of memory."""
        if rank in self.workers:
            self.workers[rank].ended = True
        stopped = self.stop is not None and self.stop.signalled
        self.outbox.tell("exit", rank=rank, code=code, stopped=stopped, **facts)
        self.registry.ended(rank, code)

    def told_to_end(self, caught: Collection[int], now: float) -> None:
        """Handle signals that ask this agent to end. If only SIGTERM has come and scripts can save a checkpoint, they
        do so first; in all other cases the workers are stopped at once."""
        if caught == {SIGTERM} and self._checkpoint is not None and (self.stop is None or self._preempted):
            self.outbox.tell("preempted")
            self._save_and_stop(now, together=not self._checkpoint["alone"])
        elif caught:
            self.signal = min(caught)
            self._begin_stop(Frame("stop"), now)

    def turn(self, now: float, steps: Mapping[int, tuple[int, float]], *, launcher_gone: bool) -> None:
        """Send a heartbeat, answer ranks that wait for files, or begin to stop the workers, whichever is due at time
        `now`. steps: for each rank, the last step of its process, and the seconds since that step."""
        first = next(rank for rank, local_rank in self.ranks.items() if local_rank == self.registry.first)
        self.registry.settle(steps[first][0], now)
        if now >= self._beat_at:
            self._beat_at = now + TURN_SECONDS
            pids = {rank: self.training(rank).pid for rank in self.living}
            self.outbox.put(SendBeat(steps, pids, [rank for rank in pids if steps[rank][1] > STILL_SECONDS]))
        if launcher_gone and (self.stop is None or self.stop.natural):
            self._begin_stop(Frame("stop"), now)
        elif self.stop is None and (missing := self._shims.missing(now)):
            self.unstarted(missing, now)
        elif self.stop is None and self._all_ended and not self._stays:
            self._begin_stop(Frame("stop", {"natural": NATURAL_SECONDS}), now)

    @property
    def patience(self) -> float:
        """Largest number of seconds until `turn` must be called next, if no event comes before."""
        return TICK_SECONDS if self.stop is not None or self.registry.is_waited_for else TURN_SECONDS

    def dumped(self, stacks: Sequence[tuple[int, int, bytes]]) -> None:
        """Send the launcher the stack traces that the workers have written before they are stopped. stacks: rank, pid
        and text for each worker."""
        self._dumps = False
        for rank, pid, text in stacks:
            if text:
                self.outbox.put(TellLauncher(Frame("stacks", {"rank": rank, "pid": pid}, text)))

    @property
    def stopping(self) -> Stop | None:
        """The stop in progress, for which `advance_stop` must be called; None if there is none."""
        return self.stop if self.stop is not None and not (self.stop.finished or self._dumps) else None

    def advance_stop(self, left: Sequence[int], now: float) -> None:
        """Take the next step of the stop in progress, if there is one. left: processes of the job that still run on
        this host."""
        if (stop := self.stopping) is not None:
            if self._all_ended:
                stop.end_naturally_in(NATURAL_SECONDS, now)
            stop.advance(left, now)

    def leave(self) -> None:
        """Tell the launcher that the job is over on this host. No further frame follows."""
        stuck = list(self.stop.stuck) if self.stop is not None else []
        self.outbox.tell("end", stuck=stuck, signal=self.signal)

    @property
    def over(self) -> bool:
        """Whether all workers have ended and their ends were reported, or those that are left cannot be killed."""
        stop = self.stop
        return stop is not None and stop.finished and (bool(stop.stuck) or self._all_ended)

    def training(self, rank: int) -> Process:
        """Return the process that trains as this rank, or the worker's own process until one begins to train."""
        return self.registry.claims.get(rank, self.workers[rank].process)

    @property
    def living(self) -> dict[int, Running]:
        """Workers that have not ended, by rank."""
        return {rank: worker for rank, worker in self.workers.items() if not worker.ended}

    def save(self, action: FindHandlers, living: Collection[int], heedless: Collection[int]) -> None:
        """Have ranks save a checkpoint. living: ranks whose processes are alive. heedless: those of them that have no
        handler for the checkpoint signal and do not get it, because it would kill them."""
        assert self._checkpoint is not None
        able = set(living) - set(heedless)
        able -= (early := self._early(able, living))
        patience = 0.0
        if action.saves or self._checkpoint["island"] > 1:
            patience = min(self._checkpoint["grace"] / 4, MOST_PATIENCE) if self._preempted else MOST_PATIENCE
        # The ranks in `asked` raise the signal themselves, all after the same step.
        asked = self.registry.tell_to_save(able, patience, action.saves)
        for rank in able - asked:
            self.outbox.put(SignalProcess(action.processes[rank], action.number))
        for ranks, handled in ((heedless, False), (early, True)):
            if ranks:
                self.outbox.tell("unheeded", number=action.number, ranks=sorted(ranks), handled=handled)

    def _early(self, able: Collection[int], living: Collection[int]) -> set[int]:
        """Return those of the ranks `able` to save that may not do so yet, as another rank of their island does not
        train or cannot save: in an island all save together, as each has a part of the model."""
        assert self._checkpoint is not None
        if (size := self._checkpoint["island"]) == 1:
            return set()
        ready = self.registry.training & set(able)
        late = {rank // size for rank in living if rank not in ready}
        return {rank for rank in able if rank // size in late}

    @property
    def _all_ended(self) -> bool:
        return not self._shims.pending and all(worker.ended for worker in self.workers.values())

    def _begin_stop(self, order: Frame, now: float) -> None:
        """Begin to stop the workers as `order` says. If they are being stopped already, the order can only make them
        end sooner."""
        self._shims.dismiss()
        grace = order.get("grace", DEFAULT_GRACE)
        if self.stop is None or self.stop.natural:
            self.stop = Stop(order.get("natural", 0.0), grace, self.outbox, now)
            if order.get("stacks"):
                self._dumps = True
                self.outbox.put(DumpStacks())
        else:
            self.stop.hasten(grace, now)

    def _interrupt(self, order: Frame, now: float) -> None:
        """Handle the order that follows Ctrl-C, and interrupt the workers as SIGINT from a terminal would. Processes
        that train raise SIGINT themselves, all after the same step, if they reach one soon
        (dadt/train/interruption.py)."""
        if self.stop is not None:
            return
        grace, living = order["grace"], self.living
        patience = min(grace / 4, MOST_PATIENCE)
        asked = self.registry.tell_training(living, Frame("interrupt", {"patience": patience}))
        for rank, worker in living.items():
            if rank not in asked:
                self.outbox.put(SignalGroup(rank, SIGINT))
            elif self.training(rank).pid != worker.process.pid:
                # The worker is a shell that runs the training process. It needs SIGINT, too, as it would otherwise run
                # its next command.
                self.outbox.put(SignalProcess(worker.process, SIGINT))
        self._begin_stop(Frame("stop", {"natural": grace, "grace": grace}), now)

    def _save_and_stop(self, now: float, *, together: bool) -> None:
        """Have the workers save, and stop those that have not ended by themselves in time. Idempotent."""
        if self._checkpoint is None or self._preempted or self.stop is not None:
            return
        self._preempted = True
        self.registry.tell(Frame("preempted"))
        # The launcher, too, asks a host that it preempts only once.
        self._save(self._saves + 1 if together else 0, self.ranks)
        grace = self._checkpoint["grace"]
        self._begin_stop(Frame("stop", {"natural": grace, "grace": grace}), now)

    def _save(self, count: int, ranks: Collection[int]) -> None:
        assert self._checkpoint is not None
        self._saves = max(self._saves, count)
        processes = {rank: self.training(rank) for rank in self.workers if rank in ranks}
        self.outbox.put(FindHandlers(processes, self._checkpoint["number"], count))

    def _signal(self, order: Frame, now: float) -> None:
        if "saves" in order.header and self._checkpoint is not None:
            self._save(order["saves"], order.get("ranks", self.ranks))
            return
        for rank in self.workers:
            if order.get("rank", rank) == rank:
                self.outbox.put(SignalGroup(rank, order["number"]))

    def _start_anew(self, order: Frame, now: float) -> None:
        if order["rank"] in self.ranks and self.stop is None:
            self.outbox.put(StartAnew(order["rank"]))

    def _answer(self, order: Frame, now: float) -> None:
        answer = dict(order["answer"])
        self.outbox.answer(order["line"], Frame(answer.pop("kind"), answer, order.body))

    def _gather_stacks(self, order: Frame, now: float) -> None:
        self.outbox.put(GatherStacks(order["number"], [rank for rank in order["ranks"] if rank in self.ranks]))

    def _unspawned(self, saying: Saying) -> None:
        if self._shims.admitted(saying.line.number):
            self.unstarted(saying.frame["message"], saying.now)

    def _shim_ended(self, saying: Saying) -> None:
        self._shims.ended(saying.line.number, saying.frame["status"], saying.frame["peak_memory"])
