"""The runtime of one worker, which creates the parts of DADT in this process and calls them in order."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch
from torch.nn.parameter import is_lazy

from dadt.comm.trace.recorder import Timeline
from dadt.config import Config
from dadt.config.check import AUTO
from dadt.control.worker_line import WorkerLine
from dadt.errors import ConfigError, DadtError, PeerLost
from dadt.train import timelines
from dadt.train.agent_reports import AgentReports
from dadt.train.algorithm import Algorithm
from dadt.train.attachment import Attachment
from dadt.train.attachments import Attachments
from dadt.train.checkpoint import Checkpoints
from dadt.train.departure import Departure
from dadt.train.drawn_batches import DrawnBatches
from dadt.train.events import Events
from dadt.train.final_weights import FinalWeights
from dadt.train.loss.recovery import Recovery
from dadt.train.optimizers import Optimizers
from dadt.train.prediction_scope import PredictionScope
from dadt.train.ranks import Ranks
from dadt.train.replay_state import ReplayState
from dadt.train.replicas import Replicas
from dadt.train.script import Script
from dadt.train.verification import Verification
from dadt.world import World


class Runtime:
    """All parts of one worker. Register built optimizers in `optimizers`, `claim` the rank, and `close` at the end.

    All methods run on the script's training thread. Every rank calls the methods that exchange data in the same order.
    """

    def __init__(
        self, world: World, config: Config, control: WorkerLine | None, find: Callable[[str], type[Algorithm]]
    ) -> None:
        """find: function that returns the algorithm class for a name."""
        self.events = Events()
        self.script = Script(world)
        self.optimizers: Optimizers
        self.recovery: Recovery
        self.ranks = ranks = Ranks(
            world,
            config,
            control,
            together=lambda: self.optimizers.algorithm.together,
            parameter_names=lambda: self.optimizers.parameter_names(),
            connect_anew=lambda error: self.recovery.connect_anew(error),
        )
        self.replay = ReplayState(ranks)
        self.optimizers = optimizers = Optimizers(ranks, self.script, self.replay, find)
        self.attachments = attachments = Attachments()
        self.buffers = optimizers.buffers
        self.batches = DrawnBatches(ranks, optimizers, attachments, self.replay)
        self.checkpoints = Checkpoints(ranks, optimizers, attachments)
        self.reports = AgentReports(ranks, attachments)
        self.prediction_scope = PredictionScope(lambda: [a.prediction for a in attachments], self.script)
        self.replicas = Replicas(ranks, optimizers, attachments, self.checkpoints.aside)
        self.verification = Verification(ranks, self.replicas)
        self.recovery = Recovery(
            ranks,
            optimizers,
            attachments,
            self.batches,
            self.checkpoints,
            self.replicas,
            self.verification,
            self.events,
        )
        self.final_weights = FinalWeights(ranks, optimizers, attachments)
        self.departure = Departure(ranks, optimizers, attachments, self.final_weights, self.events)
        self._claimed = False
        self.replay.under_way = self.replay.possible and (ranks.together if world.joins else bool(config.resume))
        ranks.requests.interruption.abort = self._interrupt
        self.events.on_finish.append(self.verification.finish)

    def _interrupt(self) -> None:
        if self.ranks.connection is not None:
            self.ranks.connection.abort("the job was interrupted (Ctrl-C)", lost=True)

    @property
    def hooked(self) -> bool:
        """Whether calls of modules and passes over loaders must be intercepted, for training or for a replay."""
        return not self.ranks.alone or self.replay.possible

    def resign(self) -> None:
        """Stop acting as a rank, in a forked child process, so that nothing that the child does is exchanged."""
        self.ranks.resign()
        self.replay.possible = self.replay.under_way = False
        self.optimizers.clear()
        self.attachments.clear()

    def leave_to_script(self) -> None:
        """Manage only what the script passes to DADT from now on, because it calls `dadt.init`. Raises DadtError if
        DADT has already begun to train, and ConfigError with options that such a script cannot use."""
        config = self.ranks.config
        if self._claimed:
            raise DadtError("dadt.init() comes too late, training has begun: call it at the top of the script")
        if config.min_np:
            raise ConfigError(
                f"--min-np {config.min_np}: a script that calls dadt.init() has ranks of its own, so that training"
                " cannot go on without one; use --max-restarts"
            )
        if config.resume or (self.replay.possible and config.snapshot_every != AUTO):
            raise ConfigError("--snapshot-every, --resume: a script that calls dadt.init() saves what it goes on from")
        self.events.on_stepped.clear()
        self.replay.stop_snapshots()
        self.events.on_begin.clear()
        self.optimizers.leave_to_script()

    # Becoming a rank of the job --------------------------------------------------------------------------------

    def claim(self) -> None:
        """Make this process act as its rank for the rest of the job, and attach every optimizer registered so far.

        Waits for the peers the first time, and whenever there are new optimizers. Raises DadtError if another process
        already acts as this rank.
        """
        if self.replay.under_way:
            return
        if self.script.explicit and not len(self.optimizers):
            return  # the script has wrapped no optimizer, so there is nothing to exchange
        if not self._claimed:
            self.take_place()
        if self.ranks.alone:
            return
        for callback in self.events.on_claim:
            callback()
        unattached = self._unattached()
        if len(unattached) > 1:
            del unattached
            # a reference cycle may keep an optimizer that the script has dropped alive on some ranks only
            gc.collect()
            unattached = self._unattached()
        for optimizer in unattached:
            self._attach(optimizer)

    def take_place(self) -> None:
        """Make this process act as its rank, and connect with the other ranks, after waiting for them."""
        ranks, config = self.ranks, self.ranks.config
        self._claimed = True
        for callback in self.events.on_place:
            callback()
        own = torch.distributed.is_available() and torch.distributed.is_initialized()
        if config.min_np and own and not ranks.world.island_size:
            raise ConfigError(
                f"--min-np {config.min_np}: the script has a process group of its own, which ends with any of"
                " its ranks; use --max-restarts"
            )
        if ranks.control is not None:
            ranks.requests.checkpoint_signal.begin(*ranks.control.claim())
            self.reports.listen()
        timeline = ranks.timeline
        if config.timeline and timeline is None:  # `dadt.init` may have started a timeline already
            timeline = Timeline(config.timeline, ranks.world)
        if not ranks.alone:
            self.recovery.join()
        if size := ranks.world.island_size:
            islands = len(ranks.world.equals)
            ranks.say(
                f"{islands} islands of {size} ranks: the script counts one of them (--scale-lr multiplies learning"
                f" rates by {islands})"
            )
        if timeline is not None:
            timelines.record(ranks, timeline)

    def _unattached(self) -> list[torch.optim.Optimizer]:
        if len(self.attachments) == self.optimizers.registered:  # in nearly every step all optimizers are attached
            return []
        return [o for o in self.optimizers if self.attachments.of(o) is None]

    def begin(self) -> None:
        """Take part in training, if this rank does not do so yet, and run the callbacks of `on_begin`. Called before a
        training forward or a use of gradients. Raises PeerLost if a rank has ended."""
        ranks = self.ranks
        trains = not (self.replay.under_way or (ranks.alone and self._claimed))
        if trains:
            self.claim()
            if not ranks.together:
                ranks.reconnection.check()
            elif ranks.deaths.outdated and not any(a.consumed for a in self.attachments):
                ranks.regroup(PeerLost("ranks have ended"))
            ranks.deaths.check()
            self.script.trains_here()
        self.script.began = True
        for callback in self.events.on_begin:
            callback()
        if trains:
            self.checkpoints.resume()

    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer train data-parallel, starting from rank 0's state."""
        if any(is_lazy(p) for g in optimizer.param_groups for p in g["params"]):
            raise DadtError(
                f"{type(optimizer).__name__} has parameters of lazy modules, whose shapes are not known yet: send a"
                " batch through the model under torch.no_grad() before training begins"
            )
        if self.ranks.together and self.optimizers.is_of_one_batch(optimizer):
            reason = "its tensors are made for one batch, which is another one on each rank"
            self.optimizers.leave_alone(optimizer, reason)
            return
        parts = self.ranks, self.optimizers, self.attachments, self.replicas, self.events, self.prediction_scope
        attachment = Attachment(*parts, optimizer)
        self.batches.attach(attachment)
        self.attachments.add(attachment)
        self.ranks.progress.measures.append(attachment.measure)
        attachment.start(partial(self._join, attachment))

    def _join(self, attachment: Attachment) -> None:
        """Load the state with which the optimizer starts: rank 0's, including state that rank 0 has loaded from a
        checkpoint, or in a running job the state of a rank that trains."""
        if attachment.index < len(self.replicas.given):
            self.replicas.take_given(attachment)
            return
        self.optimizers.compare(attachment.optimizer, attachment.name, loaded=self.checkpoints.any_loaded)
        self.replicas.take_first(attachment, weights=self.ranks.config.broadcast)
        self.checkpoints.spread(attachment)

    def attachment(self, optimizer: torch.optim.Optimizer) -> Attachment | None:
        """Return DADT's object that manages the optimizer (its attachment), created if necessary; None if DADT does not
        manage the optimizer."""
        if not self.optimizers.knows(optimizer):
            self.optimizers.register(optimizer)
        if self.script.explicit and optimizer in self.optimizers.left_alone:
            return None
        self.begin()
        return self.attachments.of(optimizer)

    # Steps of optimizers, and the end --------------------------------------------------------------------------

    def show_true_weights(self) -> None:
        """Put the true weights and the averaged buffers into the modules. Call it before the script reads or saves
        weights."""
        for attachment in self.attachments:
            attachment.prediction.undo()
        self.buffers.show_all()

    def stepped(self, attachment: Attachment | None, *, left_alone: bool = False) -> None:
        """Count a complete optimizer step, compare replicas if it is time, and run the callbacks of `on_stepped`.
        attachment: None if nothing was averaged. left_alone: whether DADT leaves this optimizer to the script."""
        ranks, progress = self.ranks, self.ranks.progress
        if attachment is not None:
            self.verification.stepped(attachment)
            self.final_weights.stepped(attachment)
        if ranks.timeline is not None:
            ranks.timeline.step(progress.step)
        if not ranks.alone:
            self.prediction_scope.stepped()
            ranks.deaths.stepped(progress.step)
        progress.stepped(perf_counter(), left_alone=left_alone)
        if ranks.control is not None:
            ranks.control.progress(progress.step, **(progress.numbers() if ranks.control.due else {}))
        ranks.requests.complete(progress.step)
        for callback in self.events.on_stepped:
            callback()
        ranks.requests.stepped(progress.step)

    def close(self, *, failed: bool = False) -> None:
        """Wait for all ranks at the end, so that a rank that ends early is noticed, and stop the C++ engine. Does
        nothing if called again."""
        self.departure.close(failed=failed)
