"""Everything one worker owns: its place among its peers, the engine, and the optimizers that train."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from dadt.comm.peer_deaths import Generation
from dadt.comm.trace.recorder import Timeline
from dadt.config import Config
from dadt.config.check import AUTO
from dadt.errors import CommError, ConfigError, DadtError, PeerLost, StartTimeout
from dadt.train import regroup, replicate
from dadt.train.algorithm import Algorithm
from dadt.train.approaches import Approach
from dadt.train.attachment import Attachment
from dadt.train.batch_weight import BatchWeight, Pass
from dadt.train.buffers import Buffers
from dadt.train.checkpoint import Checkpoints
from dadt.train.departure import Departure
from dadt.train.gathering import Gathering
from dadt.train.prediction_scope import PredictionScope
from dadt.train.verification import Verification
from dadt.world import World

if TYPE_CHECKING:
    from dadt._core import Work
    from dadt.comm.executors.device import Averaging
    from dadt.control.frame import Frame
    from dadt.control.worker_line import WorkerLine


class Runtime(Departure):
    """One per worker. `register` what is built, `claim` the rank, `attach` what trains, `close` at the end.

    All methods run on the script's training thread. Every rank calls those that exchange in the same order.
    """

    def __init__(
        self,
        world: World,
        config: Config,
        control: WorkerLine | None,
        find: Callable[[str], type[Algorithm]],
    ) -> None:
        """find: returns the class of the algorithm with a name."""
        super().__init__(world, config, control, find)
        self.began = False
        """Whether a training forward or a use of gradients has happened."""
        self.on_claim: list[Callable[[], None]] = []  # called before optimizers are attached
        self.on_place: list[Callable[[], None]] = []  # called before the rank is claimed
        self.on_begin: list[Callable[[], None]] = []  # called at every training forward and consumption
        self.on_regroup: list[Callable[[], None]] = []
        """Called when others were lost, once this rank is connected with those that are left."""
        self.on_exchange: list[Callable[[], None]] = []  # called before a step launches anything
        self.missing: Callable[[int], str] = lambda lost: f"data of {lost} of {world.world_size} is left out"
        """Given a number of lost workers, says what becomes of their data."""
        self.replaying = self.replays and (self.together if world.joins else bool(config.resume))
        """The script comes to where it was before: nothing is exchanged, and nothing trained."""
        self.replays_to = 0
        """The step at which that ends."""
        self.aside: Callable[[], AbstractContextManager[None]] = nullcontext
        """Inside, what is read from tensors is DADT's own business."""
        self.fitting = False
        """A framework's own loop trains: what is read with gradients is for that."""
        self.told: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
        """Given what DADT reports to the script; returns it, or in a replay what the script was given then."""
        self.forget: Callable[[], None] = lambda: None
        """Stops the taking of snapshots."""
        self.on_stepped: list[Callable[[], None]] = []  # called when a step is complete
        self.interruption.abort = lambda: self._abort("the job was interrupted (Ctrl-C)", lost=True)
        self._regrouping = False
        self._claimed = False
        self._drawn: weakref.WeakKeyDictionary[torch.optim.Optimizer, BatchWeight] = weakref.WeakKeyDictionary()
        """Batch weights of released or replayed optimizers: batches of the coming step may be drawn already."""
        self.buffers = Buffers()
        self.window = PredictionScope(lambda: [a.prediction for a in self.attachments], lambda: self.on_training_thread)
        self.checkpoints = Checkpoints(self, self)
        self.verification = Verification(self, self._attempt)
        self.on_end.append(self.verification.finish)

    def resign(self) -> None:
        """Give up being a rank in a forked child, whose doings concern nobody."""
        self.world = World()
        self.control = None
        self.timeline = None
        self.replays = self.replaying = False
        self.closing = True
        self._registered.clear()
        self._attachments.clear()
        self.roots.clear()

    def leave_to_script(self) -> None:
        """The script calls `dadt.init`. Raises DadtError where DADT already trains for it."""
        if self._claimed:
            raise DadtError("dadt.init() comes too late, training has begun: call it at the top of the script")
        if self.config.min_np:
            raise ConfigError(
                f"--min-np {self.config.min_np}: a script that calls dadt.init() has ranks of its own, so that training"
                " cannot go on without one; use --max-restarts"
            )
        if self.config.resume or (self.replays and self.config.snapshot_every != AUTO):
            raise ConfigError("--snapshot-every, --resume: a script that calls dadt.init() saves what it goes on from")
        self.on_stepped.clear()
        self.forget()
        self.on_begin.clear()
        super().leave_to_script()

    # Joining ---------------------------------------------------------------------------------------------------

    @contextmanager
    def as_a_whole(self) -> Iterator[None]:
        with super().as_a_whole(), nullcontext() if self.together else self.reconnection.within():
            yield

    def claim(self) -> None:
        """Become this rank for the whole job, and attach every optimizer registered so far.

        Waits for the peers the first time, and whenever there are new optimizers. A second process that claims the
        same rank gets a DadtError.
        """
        if self.replaying:
            return
        if self.explicit and len(self._registered) == len(self.left_alone):
            return  # what one rank does with an optimizer of its own concerns nobody
        if not self._claimed:
            self.take_place()
        if self.alone:
            return
        for callback in self.on_claim:
            callback()
        if len(self._unattached()) > 1:
            gc.collect()  # one that the script has dropped may live on in a cycle of references, on some ranks only
        for optimizer in self._unattached():
            self._attach(optimizer)

    def take_place(self) -> None:
        """Claim the rank, and connect with the others. Waits for them."""
        self._claimed = True
        for callback in self.on_place:
            callback()
        if self.config.min_np and torch.distributed.is_available() and torch.distributed.is_initialized():
            raise ConfigError(
                f"--min-np {self.config.min_np}: the script has a process group of its own, which ends with any of"
                " its ranks; use --max-restarts"
            )
        if self.control is not None:
            self.checkpoint_signal.begin(*self.control.claim())
            self.listen()
        timeline = self.timeline
        if self.config.timeline and timeline is None:  # else `dadt.init` has begun it
            timeline = Timeline(self.config.timeline, self.world)
        connection = None
        if not self.alone:
            if self.world.joins:
                self.enter(StartTimeout("the launcher did not let this rank into the job"))
            connection = self.connect()
            if self.generation:  # others are connected already, and say how far they are
                regroup.regroup(self, equal=self.together)
        if timeline is not None:
            self.record(timeline, connection)

    def release(self, parts: Mapping[torch.optim.Optimizer, dict[str, Any]]) -> None:
        """All optimizers are attached again at the next forward, as in a job that goes on from a checkpoint. parts:
        those of their states, as Checkpoints has them."""
        for attachment in self.attachments:
            attachment.prediction.undo()
            self._drawn[attachment.optimizer] = attachment.batch_weight
        self.buffers.release()
        self._attachments.clear()
        for optimizer, part in parts.items():
            self.checkpoints.keep(optimizer, part)

    def _unattached(self) -> list[torch.optim.Optimizer]:
        if len(self._attachments) == len(self._registered):  # as in nearly every step
            return []
        return [o for o in self.optimizers if o not in self._attachments]

    def begin(self) -> None:
        """A training forward or a consumption is next. Raises PeerLost if a rank has ended."""
        if self.replaying or (self.alone and self._claimed):
            self.began = True
            for callback in self.on_begin:
                callback()
            return
        self.claim()
        if not self.together:
            self.reconnection.check()
        elif self.deaths.outdated and not any(a.consumed for a in self.attachments):
            self.regroup(PeerLost("ranks have ended"))
        self.deaths.check()
        self._training_threads.add(threading.current_thread())
        self.began = True
        for callback in self.on_begin:
            callback()
        self.checkpoints.resume()

    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer train data-parallel, from rank 0's state."""
        if any(is_lazy(p) for g in optimizer.param_groups for p in g["params"]):
            raise DadtError(
                f"{type(optimizer).__name__} has parameters of lazy modules, whose shapes are not known yet: send a"
                " batch through the model under torch.no_grad() before training begins"
            )
        if self.together and self.is_of_one_batch(optimizer):
            self.leave_alone(optimizer, "its tensors are made for one batch, which is another one on each rank")
            return
        attachment = Attachment(self, self, optimizer, self._registered[optimizer])
        attachment.batch_weight = self._drawn.pop(optimizer, attachment.batch_weight)
        self._attachments[optimizer] = attachment
        self.progress.measures.append(attachment.measure)
        attachment.start()

    def leave_alone(self, optimizer: torch.optim.Optimizer, reason: str) -> None:
        """Average nothing for this optimizer, and say why."""
        self.left_alone.add(optimizer)
        name = type(optimizer).__name__
        self.say(f"{name} is left alone: {reason}")
        if self.replays:  # each rank may be at another step, and what it holds is no other's
            self.forget()
            self.say(f"no snapshots are taken, as {name} is left alone", "warning")

    def attachment(self, optimizer: torch.optim.Optimizer) -> Attachment | None:
        """The optimizer's attachment, made now if need be; None where DADT leaves it alone."""
        if optimizer not in self._registered:
            self.register(optimizer)
        if self.explicit and optimizer in self.left_alone:
            return None
        self.begin()
        return self._attachments.get(optimizer)

    def wait(self, work: Work | Averaging | Gathering) -> None:
        while True:
            try:
                return super().wait(work)
            except CommError as error:
                if not isinstance(work, Gathering) or self.transaction is not None or self.closing:
                    raise
                self.regroup(error)  # others may have it complete; else it was launched once more

    def connect_anew(
        self,
        error: CommError,
        seconds: float = 0.0,
        parts: Mapping[torch.optim.Optimizer, dict[str, Any]] | None = None,
    ) -> None:
        """seconds: as in `enter`. parts: as in `release`, which all do where they have waited for a new worker."""
        if self._regrouping:
            raise error
        begun, self._regrouping = perf_counter(), True
        try:
            while True:
                before = self.generation
                handed = self.enter(error, seconds).handed > before
                seconds = 0.0
                if self.together and handed:
                    self.release(parts or {})
                try:
                    self.hang_up()
                    connection = self.connect()
                    if self.timeline is not None:
                        self.timeline.record(connection, f"exchange, generation {self.generation}")
                    with self.checkpoints.aside():
                        regroup.regroup(self, equal=self.together)
                    break
                except CommError as another:
                    error = another
        finally:
            self._regrouping = False
        self.approaches.begin_anew()
        for callback in self.on_regroup:
            callback()
        seconds = perf_counter() - begun
        self.progress.stood += seconds
        size, whole = self.group.world_size, self.world.world_size
        text = self.missing(whole - size) if size < whole else ""
        missing = f"; {text}" if text else ""
        self.say(f"{size} of {whole} workers train on from step {self.step}, {seconds:.2f} s later{missing}")

    def join(self, attachment: Attachment) -> None:
        """Training begins with rank 0's state, and with what it has loaded; in a running job with that of another."""
        if attachment.index < len(self.welcome):
            replicate.take_welcome(self, attachment, self.welcome[attachment.index])
            return
        self.compare(attachment.optimizer, attachment.name, loaded=self.checkpoints.any_loaded)
        self.sync_from_rank0(attachment, weights=self.config.broadcast)
        self.checkpoints.spread(attachment)

    def sync_from_rank0(self, attachment: Attachment, *, weights: bool) -> None:
        """Take rank 0's param_group values; with `weights` its weights, buffers and optimizer state as well."""
        with self.checkpoints.aside():
            replicate.take_rank_0s(self, attachment, weights=weights)

    def follow_groups(self, attachment: Attachment) -> None:
        """Take rank 0's param_group values, where the ranks set their own in each step."""
        replicate.take_rank_0s_groups(self, attachment)

    def listen(self) -> None:
        """Have the agent report the ends of other ranks. Idempotent."""
        if self.control is not None and not self.alone and not self.deaths.listening:
            self.deaths.listening = self.control.listen(self._hear)

    def _hear(self, frame: Frame) -> None:
        if frame.kind == "preempted":
            self.deaths.preempted = True
            return
        if frame.kind == "approach":
            self.approaches.hear(Approach(frame["number"], frame["rank"], frame["known"], frame["last"]))
            return
        if frame.kind == "interrupt":
            if not self.closing:  # its script is over, and the others come to their end, too
                self.interruption.hear(frame["patience"] if self.together and self._attachments else 0.0)
            return
        if frame.kind == "save":
            self.checkpoint_signal.hear(frame["patience"] if self.together else 0.0)
            return
        text, steps = frame["text"], frame.get("steps")
        if frame.kind == "regroup":
            self.approaches.forget()
            members, firsts = tuple(frame["members"]), tuple(frame["firsts"])
            handed, writers = frame.get("handed", 0), tuple(frame.get("writers", ()))
            self.deaths.regroup(Generation(frame["generation"], members, firsts, text, handed, writers))
            if not self.together and self._engine is not None:  # else it is connecting, with whoever is there
                self.reconnection.begin()
        elif steps is None:
            self.deaths.tell(text)
        elif self._attachments:  # else only the script knows what it still expects of that rank
            self.deaths.tell_left(text, steps, self.step)

    def show_true_weights(self) -> None:
        """Undo prediction and show the official buffers: the script is about to read or save."""
        for attachment in self.attachments:
            attachment.prediction.undo()
        self.buffers.show_all()

    def drew(self, source: Pass, samples: int, nominal: int) -> None:
        """A training batch was handed to the script. Read ahead, it belongs to no step that is known, so each of those
        counts in full."""
        self.progress.samples += samples
        if self.on_training_thread:
            self.one_batch.drew(source, samples)
            for weight in self._batch_weights:
                weight.drew(source, samples, nominal)

    def pass_over(self, source: Pass) -> None:
        """The script has come to the end of a shared loader."""
        source.is_over = True
        if self.on_training_thread:
            for weight in self._batch_weights:
                weight.pass_over(source)

    @property
    def _batch_weights(self) -> list[BatchWeight]:
        if not self.replaying:
            return [attachment.batch_weight for attachment in self.attachments]
        for optimizer in self.optimizers:
            self._drawn.setdefault(optimizer, BatchWeight(lambda: self.backwards))
        return list(self._drawn.values())

    def trained_before(self, optimizer: torch.optim.Optimizer) -> None:
        """In a replay: this optimizer was stepped here, with the batches that were drawn."""
        if (weight := self._drawn.get(optimizer)) is not None:
            weight.exchanged()
            weight.stepped()

    def _attempt(self, exchange: Callable[[], None]) -> None:
        """Call `exchange`. Where ranks are lost meanwhile, those that are left compare their replicas in its place."""
        try:
            with self.checkpoints.aside():
                exchange()
        except CommError as error:
            self.regroup(error)

    def stepped(self, attachment: Attachment | None, *, left_alone: bool = False) -> None:
        """An optimizer step is complete. attachment: None where nothing is averaged; left_alone: as DADT leaves this
        optimizer to the script."""
        if attachment is not None:
            self.verification.stepped(attachment)
            self.final_weights.stepped(attachment)
        if self.timeline is not None:
            self.timeline.step(self.step)
        if not self.alone:
            self.window.stepped()
            self.deaths.stepped(self.step)
        self.progress.stepped(perf_counter(), left_alone=left_alone)
        if self.control is not None:
            self.control.progress(self.step, **(self.progress.numbers() if self.control.due else {}))
        for callback in self.on_stepped:
            callback()
        self.checkpoint_signal.stepped()
        self.interruption.stepped()
