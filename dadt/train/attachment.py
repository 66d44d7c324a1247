"""One optimizer that DADT manages, with its exchanges, its algorithm and its weight prediction."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from dadt.comm.shards import local
from dadt.errors import DadtError
from dadt.train import prediction
from dadt.train.agreement import Agreement
from dadt.train.algorithm import Algorithm
from dadt.train.batch_weight import BatchWeight
from dadt.train.buffers import ChangingBuffers
from dadt.train.common_values import take_first_ranks
from dadt.train.events import Events
from dadt.train.exchange import fingerprint
from dadt.train.exchange.bucket_plan import BucketPlan
from dadt.train.exchange.delivery import hand_out, hand_out_zeros, ratio_of, without_averages
from dadt.train.exchange.exchange import Exchange
from dadt.train.exchange.momentum_exchange import MomentumExchange
from dadt.train.exchange.step_metadata import StepMetadata
from dadt.train.finite import Finite
from dadt.train.growth import Growth
from dadt.train.loss.lockstep import Lockstep
from dadt.train.measure import Measure
from dadt.train.momentum import Momentum
from dadt.train.optimizers import Optimizers
from dadt.train.param_groups import groups_crc
from dadt.train.prediction_scope import PredictionScope
from dadt.train.ranks import Ranks
from dadt.train.replicas import Replicas
from dadt.train.restored import RestoredExchange
from dadt.train.trained import ParameterListing, below, listed, sparse_tables
from dadt.train.weighing import Weighing

_dtype, _device = attrgetter("dtype"), attrgetter("device")


class Attachment:
    """One optimizer managed by DADT. Every rank attaches the same optimizers in the same order."""

    def __init__(
        self,
        ranks: Ranks,
        optimizers: Optimizers,
        siblings: Iterable[Attachment],
        replicas: Replicas,
        events: Events,
        scope: PredictionScope,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """siblings: the attachments of all optimizers that train, including this one."""
        self.ranks = self.runtime = ranks  # user-written algorithms use the name `runtime`
        self.optimizers, self.siblings, self.replicas, self.events = optimizers, siblings, replicas, events
        self._scope = scope
        self._optimizer = weakref.ref(optimizer)
        self.index = optimizers.number(optimizer)
        self.step = 0
        self.lockstep = Lockstep(self, ranks)
        self.has_closure = False
        self.warmup_steps = ranks.config.warmup_steps
        self.compression = ranks.config.compression if ranks.together else "none"  # compression method of gradients
        self.measure = Measure(ranks.progress)
        self._modules = below(optimizers.root_modules(optimizer))
        self.changing_buffers = ChangingBuffers(optimizers.buffers, ranks, self.name)
        self.listing = ParameterListing()
        self.known = WeakTensorKeyDictionary()  # parameters whose values all ranks have from rank 0
        self._welcomed: list[torch.Tensor] = []  # parameters that `broadcast_new_parameters` saw last
        self.scale: torch.Tensor | None = None  # loss scale of this step, if the script has a GradScaler
        # id and version of the GradScaler's tensor from which `scale` was read
        self.scale_token: tuple[int, int] | None = None
        self.batch_weight = BatchWeight(lambda: optimizers.script.backwards)
        self.weighing = Weighing(self)
        self.agreement = Agreement(self.name, ranks, partial(replicas.take_first, self))
        self.finite = Finite(ranks.config.on_nan, ranks, optimizers.parameter_names, self.measure)
        # number of exchanges so far, one per step or closure evaluation, and number that is added to it in their names,
        # since a resumed training continues with the checkpoint's step
        self.exchanges = self.numbered_from = 0
        # whether this step's gradients are averaged, and whether the optimizer's own step() is running
        self.consumed = self.stepping = False
        self._held: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._growth = Growth()
        self._schema: BucketPlan | None = None
        self._followed: list[torch.Tensor] = []  # the parameters that the bucket plan covers
        self._tables: list[torch.Tensor] = []  # parameters whose gradients are sparse tensors
        self._token: tuple[Any, ...] = ()
        self.prediction = prediction.choose(ranks.config, optimizer, self.parameters, ranks.group.world_size)
        # An optimizer that is garbage-collected before its step must not leave predicted weights behind.
        weakref.finalize(optimizer, self.prediction.undo).atexit = False
        self.algorithm: Algorithm = optimizers.algorithm(self)
        self.momentum = Momentum(self)
        self.switch_note: dict[str, Any] = {}  # entries that checkpoints add to the algorithm's state

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "used after the optimizer was collected"
        return optimizer

    @property
    def alive(self) -> bool:
        return self._optimizer() is not None

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The optimizer's trained parameters in registration order; empty once the optimizer is garbage-collected."""
        return self.listing.trained(optimizer) if (optimizer := self._optimizer()) else []

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of the models that this optimizer trains, updated when its parameters change."""
        return [m for ref in self._modules if (m := ref()) is not None]

    @property
    def name(self) -> str:
        return "" if self.index == 0 else f" of optimizer #{self.index + 1}"

    @property
    def overlaps(self) -> bool:
        """Whether buckets may be launched during backward: not with several optimizers, whose order could differ."""
        return not (self.has_closure or self.consumed) and self.optimizers.trains_one and self.weighing.launches_early

    @property
    def schema(self) -> BucketPlan:
        assert self._schema is not None, "used before it was started"
        return self._schema

    @property
    def trained(self) -> tuple[Any, ...]:
        """Value that changes when the script adds, freezes, moves or casts any trained parameter."""
        return (*self._token[0], self.listing.used)

    @property
    def schema_is_current(self) -> bool:
        return self._schema is not None and self._token == self._make_token(self.parameters)

    def _make_token(self, parameters: list[torch.Tensor]) -> tuple[Any, ...]:
        return (
            (*map(id, parameters), *map(_dtype, parameters), *map(_device, parameters)),
            tuple((id(m), n, b.shape, b.dtype, b.device) for m, n, b in self.buffers()),
            tuple(id(p) for p in parameters if p in seldom) if (seldom := self.momentum.idle.seldom) else (),
        )

    def buffers(self) -> list[tuple[nn.Module, str, torch.Tensor]]:
        return self.changing_buffers.of(self._modules) if self.ranks.config.buffers else []

    def start(self, take: Callable[[], None]) -> None:
        """Begin to train. take: function that copies the first rank's optimizer state, called on every rank."""
        if self.ranks.config.broadcast:
            self.algorithm.starting()
        self.lockstep.join(take)
        self.known.update(dict.fromkeys(listed(self.optimizer), True))
        if self.ranks.config.buffers:
            self.changing_buffers.watch(self.modules)
        self.refresh()
        self.algorithm.started()

    def broadcast_new_parameters(self) -> None:
        """Copy rank 0's values of newly added parameters to all ranks. Returns at once if there are none."""
        every = self.listing.every(self.optimizer)
        if every is self._welcomed:
            return
        self._welcomed = every
        self.momentum.follow()
        new = {p: True for p in every if p not in self.known}
        if not new:
            return
        if self.ranks.config.broadcast:
            values, name = [local(p.data) for p in new], f"late weights{self.name}"
            take_first_ranks(self.ranks, values, name, partial(self.known.update, new))
        self.known.update(new)
        self._modules = below(self.optimizers.root_modules(self.optimizer))
        if self.ranks.config.buffers:
            self.changing_buffers.watch(m for m in self.modules if m not in self.optimizers.buffers)

    def refresh(self) -> None:
        """Adapt the bucket plan and the prediction if parameters or averaged buffers have changed."""
        self._followed, token = (parameters := self.parameters), self._make_token(parameters)
        if self._schema is not None and token == self._token:
            return
        if self._schema is None or token[0] != self._token[0]:
            self.prediction.follow(parameters)
            self.momentum.follow()
            if self._growth.watches or self.algorithm.wants_gradients:
                self.watch_gradients()
            self._tables = sparse_tables(self.modules, parameters)
        where = int(self.ranks.config.bucket_mb * 2**20), self.ranks.device, self.algorithm.in_flight + 1
        how = self.compression, self.momentum.sends, self.momentum.idle.seldom
        self._schema = BucketPlan(parameters, self.buffers(), *where, *how)
        self._token = token

    def watch_gradients(self) -> None:
        """Begin to detect when a backward adds to a gradient, for the algorithm's `gradient_ready`."""
        self._growth.told = self.algorithm.gradient_ready if self.algorithm.wants_gradients else None
        self._growth.watch(self.parameters)

    def compress(self, name: str) -> None:
        """Change the compression from the next exchange on. All ranks call it, while no exchange is under way."""
        self.compression, self._token = name, (self._token[0], None)
        self.refresh()

    def switch_to(self, algorithm: Algorithm, **note: Any) -> None:
        """Train with another algorithm from now on, which all ranks do in the same step. note: further entries of
        `switch_note`, so that a run that loads the checkpoint switches, too."""
        self.algorithm, self.switch_note = algorithm, {**self.switch_note, **note}
        self.measure.late = 0

    def average_gradients(self) -> None:
        """Exchange gradients at the first call within a step, and set `.grad` to what the optimizer should apply."""
        if self.consumed and not self.algorithm.averages:
            return  # no average has been applied, so the script may add to its rank's own gradients
        if self.consumed and self._growth.seen and not self._growth.has_averages:
            self.skipped()  # the script has replaced the averaged gradients by new ones
        if self.consumed:
            if self._growth.seen:
                raise DadtError(
                    "a backward added to gradients that were already clipped or unscaled in this step, and so"
                    " averaged: clip once, after the step's last backward"
                )
            self.momentum.shown.early = True
            return
        self.stepping = False
        for callback in self.events.on_exchange:
            callback()
        self.broadcast_new_parameters()
        if self.step > 0 and self.ranks.together:
            self.changing_buffers.select()
        self._release_other_predictions()
        if self.algorithm.averages:
            self.listing.use_frozen(self.optimizer, self._followed)
        parameters = self.parameters
        if len(self.prediction.given) != len(parameters):
            self.prediction.follow(parameters)
        if self.finite.look(parameters, self.scale) and self.finite.skips:
            self.zero_gradients()  # the compression's error feedback would store a NaN or infinity forever
        self.momentum.see()
        if self.algorithm.tracks:
            into = self._schema.addresses if self._schema is not None else frozenset()
            self.prediction.before_step(late=self.algorithm.predicts, scale=self.scale, delivery=into)
        else:
            self.prediction.undo()
        self.refresh()
        if self._token[0]:
            self.lockstep.average()
        self._growth.delivered(parameters)
        self.weighing.exchanged()
        self.consumed = True

    def _release_other_predictions(self) -> None:
        """Remove other optimizers' predicted weights from parameters that the coming step is to change."""
        others = [other for other in self.siblings if other is not self]
        ids = {id(p) for p in self.parameters} if others else set()
        for other in others:
            other.prediction.release(ids)

    def backward_begins(self) -> None:
        """Called before each backward: begin to detect additions to averaged gradients, which are an error."""
        if self.consumed and not self._growth.watches:
            self.watch_gradients()

    def forget_launched(self, exchange: Exchange | None) -> None:
        """Called when ranks were lost: drop residuals, and let a later exchange use the number of `exchange`."""
        split = self.momentum.forget()
        if self._schema is not None:
            self._schema.forget_residuals()
            self.refresh() if split else None
        if exchange is not None:
            self.exchanges -= 1
            exchange.give_back()

    def zero_gradients(self) -> None:
        """Set the gradients to zeros for a step that applies none, in new memory, because an exchange may still read
        the old memory."""
        hand_out_zeros(self.parameters, self._tables)

    def withhold_gradients(self) -> None:
        """Remove the gradients if no average has arrived yet, so that the step changes no weight, momentum or counter.
        Called just before the optimizer steps."""
        self.stepping = True
        if self.agreement.follows and self.algorithm.averages:
            # Fetch values just before the step: no exchange is open then, and the script has set them for this step.
            self.replicas.take_first_groups(self)
        if self.algorithm.holds:
            self._held = [(p, p.grad) for p in self.parameters]
            for p, _ in self._held:
                p.grad = None
        else:
            self.momentum.before_step()

    def stepped(self) -> None:
        """Restore withheld gradients, update the prediction and end the step. Called when the optimizer has stepped."""
        self.momentum.shown.stepped()
        self.prediction.after_step(held=bool(self._held), scale=self.scale)
        for p, gradient in self._held:
            p.grad = gradient
        self._held = []
        self._end_step()

    def skipped(self) -> None:
        """End a step that all ranks skip, because gradients are infinite or the script discards the averages."""
        self.prediction.forget()
        self._end_step()
        self._scope.stepped()

    def _end_step(self) -> None:
        self.consumed = False  # from here on, ranks that lack the step's averages may take this rank's weights
        self.algorithm.after_step()
        self.measure.stepped()
        self.step += 1
        self.batch_weight.stepped()
        self._growth.forget()
        self.listing.let_go()
        self.scale, self.stepping = None, False

    def loaded(self) -> None:
        """Drop what predictions are computed from. Called when the script has replaced weights by `load_state_dict`."""
        self.prediction.forget()
        self.algorithm.loaded()

    @property
    def compresses(self) -> bool:
        """Whether the next exchange is compressed. It is not with closures, since line searches compare their results,
        nor in PowerSGD's warm-up, since power iteration starts better from settled gradients."""
        settles = self.compression.startswith("powersgd") and self.step < self.warmup_steps and not self.algorithm.tries
        return not self.has_closure and not settles

    def new_exchange(self, *, again: bool = False) -> Exchange:
        assert self._schema is not None
        self.exchanges += not again
        name = f"step {self.numbered_from + self.exchanges - 1}{self.name}{', again' if again else ''}"
        if again:
            self._schema.forget_residuals()  # a discarded exchange has changed the compression's residuals
        of_exchange = self.ranks, self._schema, self.exchanges - 1, name, self.weighing.settle(again=again)
        if self.momentum.sends:
            exchange: Exchange = MomentumExchange(*of_exchange, self.momentum)
        else:
            exchange = Exchange(*of_exchange, compressed=self.compresses)
        exchange.scale = self.scale
        self.ranks.keep(exchange)
        return exchange

    def close(self, exchange: Exchange, *, growth: int = 0, redo: bool = False, value: float = 0.0) -> None:
        """Launch the exchange's remaining buckets with this rank's metadata, and the algorithm's number `value`."""
        exchange.scale, exchange.frozen = self.scale, self.listing.used
        exchange.close(
            StepMetadata(
                layout=exchange.schema.crc,
                drawn=self.batch_weight.drawn,
                order=self.batch_weight.order,
                groups=groups_crc(self.optimizer),
                fingerprint=self.agreement.fingerprint(exchange.number, self.parameters, self._weights),
                growth=growth,
                redo=redo,
                weight=exchange.weight,
                value=value,
                not_finite=self.finite.number,
                **self.ranks.requests.heard,
                loss=self.agreement.loss,
                square=self.momentum.shown.square,
                density=self.weighing.density,
            )
        )

    def _weights(self, number: int) -> tuple[int, int]:
        """Return fingerprints of some trained (not predicted) weights, and of parameters that no optimizer trains."""
        equal = self.algorithm.identical and self.ranks.config.broadcast
        trained = fingerprint.of_trained(self.parameters, number) if equal else 0
        # Parameters of other optimizers are left out, as they may contain predicted weights.
        others = [p for o in self.optimizers if o is not self.optimizer for p in listed(o)]
        return trained, fingerprint.of_untrained(self.modules, others) if self.algorithm.predicts else 0

    def wait(self, exchange: Exchange | RestoredExchange) -> list[StepMetadata]:
        """Wait for an exchange and return all ranks' metadata. User-written algorithms call it by this name."""
        return exchange.receive()

    def deliver(self, exchange: Exchange | RestoredExchange) -> None:
        self.momentum.delivering()
        averages = exchange.averaged_gradients()
        self.momentum.delivered(exchange.parameters, averages)
        self.listing.averaged(exchange.frozen, averages)
        ratio = self.momentum.ratio(averages, exchange.square, ratio_of(self.scale, exchange.scale), exchange.scale)
        hand_out(exchange.parameters, averages, ratio, exchange.frozen, self._tables)
        if exchange.schema is not self._schema and self._schema is not None:
            without_averages(self._schema.parameters, exchange.schema.parameters)
        self.optimizers.buffers.update(exchange.places, exchange.averaged_buffers())

    def agree(self, lanes: list[StepMetadata], exchange: Exchange | RestoredExchange) -> None:
        """Compare all ranks' metadata and act on differences, in the same way on all ranks. Raises Mismatch."""
        self.measure.exchanged(exchange.seconds, exchange.waited)
        self.weighing.agree(lanes)
        newest, late = self.exchanges - 1, self.measure.delayed > 0
        self.agreement.check(lanes, exchange, newest, self.batch_weight.begun, late=late)
