"""Everything one worker owns: its place in the world, the engine, and the optimizers that train."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dadt import algorithms
from dadt.comm import executors, plain
from dadt.comm.bucket import DTYPES, split
from dadt.comm.executors.mail import NoMail
from dadt.comm.executors.meet import AllRanks, Meet
from dadt.comm.peer_deaths import Abort, Deaths
from dadt.comm.trace.gather import Alone, Peers, Through
from dadt.comm.trace.merge import merge
from dadt.comm.trace.recorder import Timeline
from dadt.config import Config
from dadt.errors import CommError, CommTimeout, DadtError, Mismatch, StartTimeout
from dadt.train.attachment import Attachment
from dadt.train.buffers import Buffers
from dadt.train.checkpoint import Checkpoints
from dadt.train.exchange.background import Background
from dadt.train.param_groups import group_values, take_values
from dadt.train.progress import Progress
from dadt.train.stall import PATIENCE, Stall
from dadt.train.window import Window
from dadt.world import World

if TYPE_CHECKING:
    from dadt._core import Engine, Work
    from dadt.algorithms.local.outer import Fragment
    from dadt.comm.executors.base import Connection, Mail
    from dadt.comm.executors.device import Averaging, Device
    from dadt.comm.rendezvous.store_client import Forum
    from dadt.control.agent_client import Control
    from dadt.train.exchange.exchange import Exchange

_MERGE_SECONDS = 300.0  # that making one timeline of all ranks' may take


class Runtime:
    """One per worker. `register` what is built, `claim` the rank, `attach` what trains, `close` at the end.

    All methods run on the script's training thread. Every rank calls those that exchange in the same order.
    """

    def __init__(self, world: World, config: Config, control: Control | Forum | None) -> None:
        self.world = world
        self.config = config
        self.control = control
        self.progress = Progress()
        self.deaths = Deaths()
        self.began = False
        """A training forward or a gradient's consumption has happened."""
        self.on_claim: list[Callable[[], None]] = []
        """Called before optimizers are attached."""
        self.on_begin: list[Callable[[], None]] = []
        """Called at every training forward and consumption."""
        self._training_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._claimed = False
        self._distributed = False
        self._engine: Engine | None = None
        self._broadcaster: Engine
        self.mail: Mail = NoMail()
        """Messages between two ranks."""
        self.background: Background
        """Computes what has to be between two operations of the engine."""
        self.device: Device | None = None
        """What averages tensors of this rank's GPU where they are."""
        self.on_end: list[Callable[[], None]] = []
        """Called when the script has ended, whatever has become of its optimizers: as added, the same on all ranks."""
        self.on_stop: list[Callable[[], None]] = []
        """Called last, also after a failure: messages under way have failed, and threads that use torch end here, as
        the interpreter aborts the process where it ends and they do not."""
        self._disconnect: Callable[[], None] = lambda: None
        self._abort: Abort = lambda reason, lost: None
        self._ordinals = itertools.count()
        self._registered: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._attachments: weakref.WeakKeyDictionary[torch.optim.Optimizer, Attachment] = weakref.WeakKeyDictionary()
        self.buffers = Buffers()
        self.roots: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[weakref.ref[nn.Module]]] = (
            weakref.WeakKeyDictionary()
        )
        """The modules that the script calls, whose parameters an optimizer trains."""
        self.explicit = False
        """The script has called `dadt.init`: nothing is DADT's business but the optimizers that it wraps."""
        self.left_alone: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers whose gradients the script averages itself, or not wrapped where it calls `dadt.init`."""
        self.in_flight: list[Exchange | Fragment] = []
        """Exchanges that may not be done yet."""
        self._launched_at: weakref.WeakKeyDictionary[Exchange | Fragment, int] = weakref.WeakKeyDictionary()
        """How many steps this rank had taken when it launched each."""
        self.window = Window(self)
        self._stall = Stall(self)
        self.checkpoints = Checkpoints(self)
        self._told: set[str] = set()
        self._closed = False
        self.timeline: Timeline | None = None

    def resign(self) -> None:
        """In a forked child: it is no rank, and whatever it does concerns nobody."""
        self.world = World()
        self.control = None
        self.timeline = None
        self._closed = True
        self._registered.clear()
        self._attachments.clear()
        self.roots.clear()

    @property
    def step(self) -> int:
        """Optimizer steps that this rank has taken, over all optimizers."""
        return self.progress.step

    # What exists -----------------------------------------------------------------------------------------------

    @property
    def alone(self) -> bool:
        """A world of one: nothing is exchanged and nothing changes."""
        return self.world.world_size == 1

    @cached_property
    def together(self) -> bool:
        """All ranks take the same steps; else each goes at its own speed, and waits for nobody between them."""
        return self.alone or algorithms.find(self.config.algorithm).together

    @property
    def registered(self) -> bool:
        return len(self._registered) > 0

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All that were built so far and are not left alone, oldest first."""
        mine = [o for o in self._registered if o not in self.left_alone]
        return sorted(mine, key=lambda o: self._registered[o])

    @property
    def attachments(self) -> list[Attachment]:
        """Oldest first."""
        return sorted(self._attachments.values(), key=lambda a: a.index)

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "used before the rank was claimed"
        return self._engine

    @property
    def script_is_distributed(self) -> bool:
        """The script has a process group of its own or calls `dadt.init`: what it shares out and saves is its
        business."""
        # Also once it has destroyed the group: what it writes then it still writes by rank.
        self._distributed |= torch.distributed.is_available() and torch.distributed.is_initialized()
        return self.explicit or self._distributed

    def root_modules(self, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
        return [m for ref in self.roots.get(optimizer, ()) if (m := ref()) is not None]

    def trains(self) -> bool:
        """Gradients are enabled and a registered optimizer's model is in training mode."""
        if not torch.is_grad_enabled():
            return False
        roots = [self.root_modules(optimizer) for optimizer in list(self._registered)]
        # Parameters of no module have no mode: they train.
        return any(not modules or any(m.training for m in modules) for modules in roots)

    @property
    def on_training_thread(self) -> bool:
        """Optimizers were built or used on this thread: what it does has its place among the steps, the same on all
        ranks. What another one does, such as reading batches ahead, has none."""
        return threading.current_thread() in self._training_threads

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was built (or is first seen). Claims nothing."""
        self._training_threads.add(threading.current_thread())
        if optimizer in self._registered:
            return
        if self.explicit:
            self._registered[optimizer] = -1
            self.left_alone.add(optimizer)
        else:
            self._enlist(optimizer)

    def leave_to_script(self) -> None:
        """The script calls `dadt.init`. Raises DadtError where DADT already trains for it."""
        if self._claimed:
            raise DadtError("dadt.init() comes too late, training has begun: call it at the top of the script")
        self.explicit = True
        self.on_begin.clear()
        self._ordinals = itertools.count()
        self.left_alone.update(self._registered)

    def enlist(self, optimizer: torch.optim.Optimizer) -> None:
        """The script wraps the optimizer: it trains, and those wrapped are attached in the order of these calls."""
        if optimizer in self.left_alone:
            self.left_alone.discard(optimizer)
            self._registered.pop(optimizer)
        if optimizer not in self._registered:
            self._enlist(optimizer)

    def _enlist(self, optimizer: torch.optim.Optimizer) -> None:
        scaled = [g for o in self._registered for g in o.param_groups]
        self._registered[optimizer] = next(self._ordinals)
        factor = {"linear": float(self.world.world_size), "sqrt": self.world.world_size**0.5}.get(
            self.config.scale_lr, 1.0
        )
        if factor != 1.0:
            # A wrapper may have the very groups of the optimizer inside.
            for group in (g for g in optimizer.param_groups if not any(g is other for other in scaled)):
                group["lr"] = group["lr"] * factor

    # Joining ---------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Become this rank for the whole job, and attach every optimizer registered so far.

        Waits for the peers the first time, and whenever there are new optimizers. A second process that claims the
        same rank gets a DadtError.
        """
        if self.explicit and len(self._registered) == len(self.left_alone):
            return  # what one rank does with an optimizer of its own concerns nobody
        if not self._claimed:
            self._claimed = True
            if self.control is not None:
                self.control.claim()
                self.listen()
            timeline = self.timeline
            if self.config.timeline and timeline is None:  # else `dadt.init` has begun it
                timeline = Timeline(self.config.timeline, self.world)
            connection = None
            if not self.alone:
                connection = executors.connect(self.config, self.world, self.meet)
                self._engine, self._disconnect = connection.engine, connection.close
                self._abort = connection.abort
                self.deaths.watch(self._abort)
                self.background = Background(connection.engine)
                self._is_told, self.mail = connection.told, connection.mail
                self._broadcaster, self.device = connection.engine_of("broadcast"), connection.device
                self.progress.senders += [each for each in (connection.engine, connection.device) if each is not None]
            if timeline is not None:
                self._record(timeline, connection)
        if self.alone:
            return
        for callback in self.on_claim:
            callback()
        if len(self._unattached()) > 1:
            gc.collect()  # one that the script has dropped may live on in a cycle of references, on some ranks only
        for optimizer in self._unattached():
            self._attach(optimizer)

    def _unattached(self) -> list[torch.optim.Optimizer]:
        return [o for o in self.optimizers if o not in self._attachments]

    def begin(self) -> None:
        """A training forward or a consumption is next. Raises PeerLost if a rank has ended."""
        self.claim()
        self.deaths.check()
        self._training_threads.add(threading.current_thread())
        self.began = True
        for callback in self.on_begin:
            callback()
        self.checkpoints.resume()

    @property
    def meet(self) -> Meet:
        """Where all ranks find each other."""
        return AllRanks(self.world, self.control, self.config.start_timeout)

    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer train data-parallel, from rank 0's state."""
        if any(is_lazy(p) for g in optimizer.param_groups for p in g["params"]):
            raise DadtError(
                f"{type(optimizer).__name__} has parameters of lazy modules, whose shapes are not known yet: send a"
                " batch through the model under torch.no_grad() before training begins"
            )
        attachment = Attachment(self, optimizer, self._registered[optimizer])
        self._attachments[optimizer] = attachment
        self.progress.measures.append(attachment.measure)
        attachment.start()

    def attachment(self, optimizer: torch.optim.Optimizer) -> Attachment | None:
        """The optimizer's attachment, made now if need be; None where DADT leaves it alone."""
        if optimizer not in self._registered:
            self.register(optimizer)
        if self.explicit and optimizer in self.left_alone:
            return None
        self.begin()
        return self._attachments.get(optimizer)

    def attached(self, optimizer: torch.optim.Optimizer) -> Attachment | None:
        """The optimizer's attachment, if it has one by now."""
        return self._attachments.get(optimizer)

    def sharing(self, ids: set[int]) -> list[Attachment]:
        """Whose gradients are used, where those of these parameters (by id) are: the newest that owns just them, or
        as many, newest first, as it takes to have them all."""
        mine = [(a, {id(p) for p in a.parameters}) for a in reversed(self.attachments)]
        exact = [a for a, owned in mine if owned and owned == ids]
        if exact:
            return exact[:1]
        chosen: list[Attachment] = []
        for a, owned in mine:
            if owned & ids:
                chosen.append(a)
                ids = ids - owned
        return chosen

    def let_go(self, ids: set[int]) -> None:
        """The script drops gradients of these parameters: averages that no step has used are left out, where nothing
        is left of them."""
        for attachment in self.attachments:
            mine = attachment.parameters if attachment.consumed and not attachment.stepping else []
            others = [p for p in mine if id(p) not in ids]
            # Of a step that applies nothing all gradients are zeros.
            kept = bool(others) and (attachment.algorithm.holds or any(map(_counts, others)))
            if len(others) < len(mine) and not kept:
                attachment.skipped()

    def take_over(self, attachment: Attachment) -> None:
        """Before its step: no other optimizer's prediction may stand in parameters that this one is to change."""
        ids = {id(p) for p in attachment.parameters}
        for other in self._attachments.values():
            if other is not attachment:
                other.prediction.release(ids)

    def adopt(self, attachment: Attachment, *, weights: bool) -> None:
        """Take rank 0's param_group values; with `weights` its weights, buffers and optimizer state as well."""
        with self.checkpoints.aside():
            self._adopt(attachment, weights)

    def follow_groups(self, attachment: Attachment) -> None:
        """Take rank 0's param_group values, where the ranks set their own in each step."""
        theirs = self.collect(f"param_groups{attachment.name}", group_values(attachment.optimizer, wait=True))
        take_values(attachment.optimizer, theirs[0])

    def collect(self, name: str, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        work = self.engine.allgather(plain.encode(value, f"what ranks tell each other ({name})"), name)
        self.wait(work)
        return [plain.decode(lane) for lane in work.lanes]

    def _adopt(self, attachment: Attachment, weights: bool) -> None:
        optimizer = attachment.optimizer
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        shapes = [tuple(p.shape) for p in parameters]
        state = b""
        if self.world.rank == 0 and weights and optimizer.state:
            state = plain.encode(optimizer.state_dict()["state"], f"the state of {type(optimizer).__name__}")
        mine = (shapes, group_values(optimizer, wait=True), state)
        theirs = self.collect(f"start{attachment.name}", mine)
        for rank, (other, _, _) in enumerate(theirs):
            if other != theirs[0][0]:
                raise Mismatch(
                    f"rank {rank} trains {_count(other)} and rank 0 {_count(theirs[0][0])}{attachment.name}:"
                    " every rank must build the same model"
                )
        take_values(optimizer, theirs[0][1])
        if weights:
            # How far a rank's own weights moved says nothing of rank 0's.
            attachment.prediction.forget()
            for other in self.attachments:  # the root may have their parameters, too
                other.prediction.suspend()
            # Also what the optimizer does not train: a frozen part of the model.
            roots = self.root_modules(optimizer)
            every = dict.fromkeys([*parameters, *(p for m in roots for p in m.parameters())])
            self.broadcast([p.data for p in every], f"weights{attachment.name}")
            # Later on others may have come to differ in shape.
            averaged = [b for _, _, b in attachment.buffers()]
            buffers = averaged if attachment.step else [b for m in roots for b in m.buffers()]
            self.broadcast([b.data for b in buffers], f"buffers{attachment.name}")
            if self.world.rank != 0 and theirs[0][2]:
                groups = optimizer.state_dict()["param_groups"]
                optimizer.load_state_dict({"state": plain.decode(theirs[0][2]), "param_groups": groups})
            elif self.world.rank != 0:
                optimizer.state.clear()

    def broadcast(self, tensors: Sequence[torch.Tensor], name: str, root: int = 0) -> None:
        """Overwrite the tensors with the root's."""
        works: list[Work] = []
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            sent = [t for t in tensors if t.numel() and t.dtype in DTYPES]
            for i, bucket in enumerate(split(sent, 2**30)):
                host = [t.to("cpu").contiguous() for t in bucket.tensors]
                staged += zip(bucket.tensors, host, strict=True)
                pointers = [t.data_ptr() for t in host]
                works.append(self._broadcaster.broadcast(bucket.layout, pointers, root, f"{name} {i}"))
            for work in works:
                self.wait(work)
            for tensor, host_tensor in staged:
                if tensor.data_ptr() != host_tensor.data_ptr():
                    tensor.copy_(host_tensor)

    def average(self, tensors: Sequence[torch.Tensor], name: str, weight: float = 1.0) -> None:
        """Overwrite the tensors of the host with their means over ranks. weight: 0 for a rank whose own do not count;
        these have to be numbers all the same."""
        works: list[Work] = []
        for i, bucket in enumerate(split([t for t in tensors if t.numel() and t.is_contiguous()], 2**30)):
            pointers = [t.data_ptr() for t in bucket.tensors]
            works.append(self.engine.allreduce(bucket.layout, pointers, pointers, f"{name} {i}", weight))
        for work in works:
            self.wait(work)

    # Waiting ---------------------------------------------------------------------------------------------------

    def keep(self, exchange: Exchange | Fragment) -> None:
        """Hold the exchange's memory until its works are done, whatever becomes of its owner."""
        self.in_flight = [e for e in self.in_flight if not e.done] + [exchange]
        self._launched_at[exchange] = self.step

    def steps_before(self, work: Work | Averaging) -> int:
        """How many steps this rank had taken when it launched the work."""
        for exchange in self.in_flight:
            if any(mine is work for mine in exchange.works):
                return self._launched_at[exchange]
        return self.step

    def allgather(self, name: str, data: bytes) -> Work:
        return self.engine.allgather(data, name)

    def wait(self, work: Work | Averaging) -> None:
        """Until the work is done; says for whom it waits, and ends with an error that names them."""
        begun = perf_counter()
        stood = not work.done
        while True:
            try:
                work.wait(PATIENCE)
                if stood and self.timeline is not None:
                    self.timeline.waited(work.name, begun)
                return
            except CommError as error:
                if not isinstance(error, CommTimeout) or self._has_failed:
                    self._stall.overdue(work, perf_counter() - begun, error)
                    self.deaths.name(error)
                    raise
                self._stall.look(work, perf_counter() - begun, error, closing=self._closed)

    @property
    def _has_failed(self) -> bool:
        return self.engine.error is not None or self._broadcaster.error is not None

    def listen(self) -> None:
        """Be told of other ranks' ends. Idempotent."""
        if self.control is not None and not self.alone and not self.deaths.listening:
            self.deaths.listening = self.control.listen(self._hear)

    def _hear(self, text: str, steps: int | None) -> None:
        if steps is None:
            self.deaths.tell(text)
        elif self._attachments:  # else only the script knows what it still expects of that rank
            self.deaths.tell_left(text, steps, self.step)

    # The script's view -----------------------------------------------------------------------------------------

    def show_true_weights(self) -> None:
        """Undo prediction and show the official buffers: the script is about to read or save."""
        for attachment in self.attachments:
            attachment.prediction.undo()
        self.buffers.show_all()

    def drew(self, samples: int, nominal: int) -> None:
        """A training batch was handed to the script. Read ahead, it belongs to no step that is known, so each of those
        counts in full."""
        self.progress.samples += samples
        if self.on_training_thread:
            for attachment in self.attachments:
                attachment.drew(samples, nominal)

    def pass_over(self) -> None:
        """The script has come to the end of a shared loader."""
        if self.on_training_thread:
            for attachment in self.attachments:
                attachment.pass_over()

    def say(self, text: str, level: str = "info") -> None:
        """One line to the user, each text once; rank 0 speaks for all, warnings come from any rank."""
        if text in self._told or (self.world.rank != 0 and level == "info"):
            return
        self._told.add(text)
        if self.control is not None:
            self.control.say(text, level=level)

    def stepped(self) -> None:
        """An optimizer step is complete."""
        self.window.stepped()
        if self.timeline is not None:
            self.timeline.step(self.step)
        self.deaths.stepped(self.step)
        self.progress.stepped(perf_counter())
        if self.control is not None:
            self.control.progress(self.step, **(self.progress.numbers() if self.control.due else {}))

    # The end ---------------------------------------------------------------------------------------------------

    def close(self, *, failed: bool = False) -> None:
        """Meet the peers a last time, so that a rank that ends early is noticed; then stop the engine. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._leave(failed)
        except CommError:  # a peer did not come to the end in time; it has trained all the same
            with suppress(DadtError):
                self._tell_end()
            raise
        self._tell_end()

    def _tell_end(self) -> None:
        if self.control is not None:
            if self.step:
                self.control.progress(self.step, last=True, **self.progress.numbers())
            told = {"staleness": self.config.staleness, "explicit": self.explicit}
            self.control.done({**self.progress.summary(), **told})

    def _leave(self, failed: bool) -> None:
        if self._engine is not None:
            try:
                if failed:
                    self._engine.abort(f"rank {self.world.rank} failed")
                elif self._engine.error is None:
                    if self.control is not None:
                        self.control.ending(self.step)
                    if self.together:
                        self._arrive()
                    for attachment in self.attachments:
                        attachment.algorithm.finish()
                    for callback in self.on_end:
                        callback()
                    if not self.together:
                        self._arrive()
                    self.wait(self._engine.allgather(b"", self._end))
                    self._merge_timelines()
            finally:
                self._stop(self._engine)
        elif not failed:
            self._merge_timelines()
        elif self.timeline is not None:
            self.timeline.stop()

    @property
    def _end(self) -> str:
        # With gradients of its own a rank's scaler may have left out steps that others took.
        same = self.alone or algorithms.find(self.config.algorithm).identical
        return f"the end, after {self.step} steps" if same else "the end"

    def _arrive(self) -> None:
        """Raises where the others are not there yet: those that wait for this rank say so, and fail.

        Once all are there, what is still in flight ends, too: the engine runs in order.
        """
        if self.control is not None and not self._is_told:
            try:
                self.control.exchange("the end", self._end.encode(), self.config.timeout)
            except StartTimeout as error:
                raise CommTimeout(str(error)) from error

    def _record(self, timeline: Timeline, connection: Connection | None) -> None:
        if self.timeline is None:
            timeline.start(self._peers(self.config.timeout))
            self.timeline = timeline
        if connection is not None:
            timeline.record(connection, "exchange")

    def _merge_timelines(self) -> None:
        if self.timeline is not None and (text := merge(self.timeline, self._peers(_MERGE_SECONDS))):
            self.say(text)

    def _peers(self, timeout: float) -> Peers:
        return Alone() if self._engine is None else Through(self._engine, self.world.world_size, timeout)

    def _stop(self, engine: Engine) -> None:
        self.deaths.forget(self._abort)
        if self.control is not None:
            self.control.stop_listening()
        try:
            engine.close(5.0)
        finally:
            self.background.close()
            if self.timeline is not None:
                self.timeline.stop()
            self._disconnect()
            for callback in self.on_stop:
                callback()
            self.in_flight.clear()


def _counts(parameter: torch.Tensor) -> bool:
    """Its gradient is there and not zero."""
    gradient = parameter.grad
    if gradient is not None and gradient.layout != torch.strided:
        gradient = gradient.coalesce().values()
    return gradient is not None and bool(gradient.any())


def _count(shapes: Sequence[tuple[int, ...]]) -> str:
    return f"{len(shapes)} parameters of {sum(torch.Size(s).numel() for s in shapes):,} values"
