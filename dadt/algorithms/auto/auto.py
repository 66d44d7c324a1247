"""`--algorithm auto`: measures the first, synchronous steps, then continues with the fastest algorithm and
compression."""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

from dadt.algorithms.auto import asked, choice, report
from dadt.algorithms.auto.asked import given_algorithm, given_compression
from dadt.algorithms.auto.choice import Times
from dadt.algorithms.auto.record import StepRecord
from dadt.algorithms.auto.ways import Choice
from dadt.algorithms.local.local import Local
from dadt.algorithms.pipe.pipe import Pipe
from dadt.comm.compression import OF_MOMENTUM
from dadt.config.check import LEAST_MEASURED
from dadt.control.machine import cores
from dadt.train.algorithm import Algorithm, Relaunched
from dadt.train.attachment import Attachment
from dadt.train.exchange.exchange import Exchange
from dadt.train.loss.gathering import Gathering
from dadt.train.measure import milliseconds
from dadt.train.restored import RestoredExchange

TRIES = 3
"""Least number of synchronous steps in which each compression is tried."""
SLOW, FEW = 4.0, 2
"""A link is slow if an uncompressed exchange takes more than this factor times the time to compute a step; then bytes
decide, and so many steps of each compression show enough."""
LATE = 8
"""Number of steps measured after `pipe` was chosen. Their median must confirm the time predicted for `pipe`."""


class Auto(Algorithm):
    """Chooses the algorithm or the compression, whichever the user has set to `auto`, at the end of the synchronous
    warm-up steps.

    The last warm-up steps try compressions, because their cost depends on the processor as well as on the network. On a
    slow link, where uncompressed steps would take most of a short training, all steps after the second do, most of them
    with the compression that sends least. In the very last one, the ranks send each other their measured times, and all
    make the same choice, by the times of the slowest rank. The chosen `sync`, `pipe` or `local` takes over. The cost of
    `pipe` shows only in steps with late averages: if `pipe` is chosen, its first steps are measured, and all ranks
    choose once more.
    """

    survives = True

    attachment: Attachment

    def __init__(self, attachment: Attachment) -> None:
        super().__init__(attachment)
        attachment.compression = given_compression(attachment) or "none"
        self._pipe, self._local = Pipe(attachment), Local(attachment)
        """Algorithms that may be chosen. Before the choice, `Pipe` makes the steps, all of them synchronous."""
        self._costs: Mapping[Choice, float] = {}
        """The loss that each way costs among which the choice was made; empty before it."""
        self._pipe.waits = True
        self._way: Choice | None = None
        """The chosen algorithm and compression; None before the choice."""
        self._record = StepRecord()
        self._until = 0
        """Number of the step at which the synchronous warm-up steps end; 0 before the first step."""
        self._told: Gathering | None = None
        """The allgather of all ranks' measured times, until these are used to choose; None at all other times."""
        self._backwards = self._backwards_before = 0
        """Number of backward passes in the last step, and in all steps up to its exchange."""
        self._tried: Sequence[str] = ()
        """Compressions that are tried in the warm-up steps."""
        self._slow_since = 0
        """Number of the step from which on compressions are tried because the link is slow; 0 if it is not."""
        self._trained: tuple[Any, ...] = ()
        """Parameters that the script trained in the first step."""
        self._found: Mapping[Choice, float] = {}
        """Predicted seconds per step of each choice, from the choice of `pipe` until the first steps of `pipe` are
        measured; otherwise empty."""
        self._review = 0
        """Number of the step at which the measured times of `pipe` are compared with the predicted ones."""
        self._ends_of_steps: deque[float] = deque(maxlen=LATE + 1)

    @property
    def tracks(self) -> bool:
        return self._pipe.tracks

    @property
    def holds(self) -> bool:
        return self._pipe.holds

    @property
    def launched(self) -> Exchange | None:
        return self._pipe.launched

    @property
    def pending(self) -> Exchange | RestoredExchange | None:
        return self._pipe.pending

    def regroup(self, behind: bool, keep: bool) -> Exchange | None:
        return self._pipe.regroup(behind, keep)

    def rounds(self) -> dict[str, list[int]]:
        return self._local.rounds()

    def follow(self, rounds: Sequence[Mapping[str, Sequence[int]]]) -> Sequence[Relaunched]:
        return self._local.follow(rounds)

    def started(self) -> None:
        a = self.attachment
        shares = any(way.algorithm == "local" or way.compression in OF_MOMENTUM for way in asked.ways(a))
        if shares and (self._measures or given_algorithm(a) == "local"):
            a.momentum.consider()

    # Measuring the synchronous steps ---------------------------------------------------------------------------

    def starting(self) -> None:
        # Earlier optimizers of the script may have switched to `local`. Their weights must be averaged before this
        # optimizer begins.
        self._local.starting()

    def before_step(self) -> None:
        a, record = self.attachment, self._record
        if not self._measures:
            self._pipe.before_step()
            return
        if not self._until:
            self._tried = asked.to_try(a)
            every = [self._travels] if given_compression(a) else ["none", *self._tried]
            untried = [name for name in every if not record.moving(name)]
            self._until = a.step + max(LEAST_MEASURED - record.steps, TRIES * len(untried) + 1, a.warmup_steps - a.step)
            self._trained = a.trained
        # The difference is 0 if this step is repeated after a loss of ranks; in this case the previous count stays.
        self._backwards = (a.optimizers.script.backwards - self._backwards_before) or self._backwards
        self._backwards_before = a.optimizers.script.backwards
        self._try()
        record.computed()
        exchange = self._pipe.launch()
        if a.step + 1 >= self._until:
            # The times are gathered while the exchange is still under way, so that this step can be repeated if ranks
            # are lost.
            sizes = [sum(t.numel() * t.element_size() for t in bucket.parts) for bucket in a.schema.buckets]
            self._gather("times", {"times": asdict(self._times), "sizes": sizes})
        elif record.steps == 1 and self._tried and not given_compression(a):
            self._gather("link", record.link)
        self._pipe.apply(exchange)
        record.exchanged(self._travels, exchange.seconds)

    @property
    def _travels(self) -> str:
        """The compression of this step's exchange. Before momentum is sent, gradients are, in int4."""
        a = self.attachment
        if not a.compresses:
            return "none"
        return "int4" if a.compression in OF_MOMENTUM and not a.momentum.sends else a.compression

    def _gather(self, name: str, value: Any) -> None:
        """Gather every rank's value on all ranks. A step that is repeated after a loss of ranks reuses an allgather
        that is complete. Raises CommError."""
        ranks = self.attachment.ranks
        if self._told is None or not self._told.complete:
            self._told = ranks.gather_from_all(f"{name}{self.attachment.name}", json.dumps(value).encode())
        ranks.wait(self._told)

    def _try(self) -> None:
        """Set the compression to try in the current warm-up step."""
        a, tried = self.attachment, self._tried
        if self._slow_since:
            # What bf16 saves of a slow link, int8 saves twice, for the same loss.
            few = [name for name in tried if name != "bf16"]
            name = few[min((a.step - self._slow_since) // FEW, len(few) - 1)]
            if a.step + 1 >= self._until:
                # What int4 still owes is sent in 8 bits: uncompressed it would take as long as many steps.
                name = "int8" if "int8" in few else "none"
            self.tries = name != "none"
            self._compress(name)
            return
        # The times of the last warm-up step would be known only after the ranks have exchanged their times, so this
        # step tries nothing.
        number = len(tried) - max(self._until - a.step - 2, 0) // TRIES - 1
        self.tries = 0 <= number < len(tried)
        name = tried[number] if self.tries else a.compression
        if a.step + 1 >= self._until and not given_compression(a):
            name = "none"  # what the tried compressions still owe is sent before the chosen algorithm begins
        self._compress(name)

    def _compress(self, name: str) -> None:
        """Use compression `name` in the following exchanges, in the same buckets. Earlier residuals are sent, too."""
        a = self.attachment
        if name != a.compression:
            a.compression = name
            a.schema.compress(name, momentum=a.momentum.sends)

    @property
    def _times(self) -> Times:
        a = self.attachment
        return self._record.times(
            a.measure.compute,
            a.measure.alone,
            cores() / a.ranks.world.local_size,
            may_part=a.trained == self._trained and a.optimizers.trains_one,
            backwards=max(self._backwards, 1),
        )

    def after_step(self) -> None:
        self._pipe.after_step()
        a = self.attachment
        if self._told is not None:
            told = [json.loads(lane) for lane in self._told.lanes]
            if a.step + 1 < self._until:
                self._see_link(told)
                return
            self._choose([Times(**each["times"]) for each in told], told[0]["sizes"])
        elif not self._measures and a.step + 1 >= a.warmup_steps:
            self._choose_unmeasured()

    def _see_link(self, told: Sequence[tuple[float, float]]) -> None:
        """Begin to try compressions if the link is slow. told: each rank's `StepRecord.link`."""
        self._told = None
        exchange, compute = map(max, zip(*told, strict=True))
        if exchange > SLOW * compute:
            self._slow_since = self.attachment.step + 1

    # Choosing an algorithm and compression ---------------------------------------------------------------------

    def _choose(self, every: Sequence[Times], sizes: Sequence[int]) -> None:
        """Choose the algorithm and compression from `every`, each rank's measured times, and `sizes`, the bytes in each
        bucket of rank 0."""
        a = self.attachment
        measured = choice.slowest(every)
        times, shape = choice.completed(measured), asked.shape(a, sizes)
        self._costs = asked.ways(a, may_part=times.may_part)
        found = {way: choice.seconds(way, times, shape) for way in self._costs if way.compression in times.exchange}
        way = self._best(found)
        a.ranks.say(
            f"{report.measured(self._record.steps, measured)}: {report.flags(a)}{a.name} {report.chosen(a, way, found)}"
        )
        self._take(way)
        others = [each for each in found if each.algorithm != "pipe"]
        if way.algorithm == "pipe" and others:
            self._found = {each: found[each] for each in found if each == way or each in others}
            self._review = a.step + LATE + 2
            self._pipe.ends, self._pipe.stepped = self._ends, self._late_step_ends

    def _best(self, found: Mapping[Choice, float]) -> Choice:
        return choice.best(found, self._costs, asked.shown(self.attachment).doubling)

    @property
    def _measures(self) -> bool:
        """Whether exchanges can be timed. They cannot with optimizer closures, whose gradients are not compressed, nor
        on GPUs, which run asynchronously to the host."""
        return not self.attachment.has_closure and self.attachment.ranks.device is None

    def _choose_unmeasured(self) -> None:
        a = self.attachment
        if not a.has_closure:
            way = Choice(given_algorithm(a) or "pipe", given_compression(a) or "none")
            a.ranks.say(f"{report.flags(a)}{a.name} chooses {way}: exchanges between GPUs cannot be measured")
            self._take(way)
        elif given_algorithm(a) == "local":
            self._take(Choice("local", "none"))

    def _ends(self) -> bool:
        a = self.attachment
        if a.momentum.begins:
            self._review = a.step + LATE + 2  # the steps before momentum is sent are longer
        if not self._found or a.step < self._review:
            return False
        self._gather("late steps", statistics.median(after - before for before, after in pairwise(self._ends_of_steps)))
        assert self._told is not None
        return self._best(self._corrected(self._told)) != self._way

    def _late_step_ends(self) -> None:
        if self._found:
            self._ends_of_steps.append(perf_counter())
            if self._told is not None:
                self._choose_anew(self._told)

    def _corrected(self, told: Gathering) -> dict[Choice, float]:
        """Return the predicted seconds per step of each choice; for the current choice, the seconds that the slowest
        rank measured."""
        return {each: max(map(json.loads, told.lanes)) if each == self._way else s for each, s in self._found.items()}

    def _choose_anew(self, told: Gathering) -> None:
        found = self._corrected(told)
        self._found, self._told = {}, None
        if (way := self._best(found)) != self._way:
            a, late = self.attachment, next(each for each in found if each.algorithm == "pipe")
            measured = f"after {LATE} late steps, of which each took {milliseconds(found[late])}"
            a.ranks.say(f"{measured}: {report.flags(a)}{a.name} {report.chosen(a, way, found)}")
            self._take(way)

    def _take(self, way: Choice, *, resumed: bool = False) -> None:
        """Train with the algorithm and compression `way` from the next step on. All ranks call this method together,
        while no exchange is under way. resumed: whether the algorithm's state is loaded right after it."""
        a = self.attachment
        self._way, self._told = way, None
        a.switch_note = {"way": list(way)}
        self._pipe.begin()
        alone = way.algorithm == "local"
        if alone or given_compression(a) not in OF_MOMENTUM:
            a.momentum.ask(way.compression, alone=alone)
        self._compress(way.compression)
        if known := self._record.moving(way.compression):
            a.measure.load_state({**a.measure.state(), "exchange": known})
        if way.algorithm == "sync":
            self._pipe.step_synchronously("" if given_algorithm(a) else f"{report.flags(a)} chose sync")
        elif alone:
            a.prediction.end()
            a.switch_to(self._local)
            self._local.choose(way.compression, way.every, at_once=way.at_once)
            if not resumed:
                self._local.begin()
        else:
            a.switch_to(self._pipe)

    # State in checkpoints --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {**self._pipe.state(), "record": self._record.state(), "slow since": self._slow_since}

    def by_parameter(self, state: dict[str, Any]) -> dict[int, torch.Tensor]:
        return self._local.by_parameter(state)

    def observe(self) -> dict[str, Any]:
        a = self.attachment
        return super().observe() | ({} if given_compression(a) else {"tries": a.compression})

    def restore(self, own: dict[str, Any]) -> None:
        super().restore(own)
        if "tries" in own and not given_compression(self.attachment):
            self._compress(own["tries"])  # residuals are of the compression that was tried

    def load_state(self, state: dict[str, Any]) -> None:
        a = self.attachment
        if "way" in state:
            way = Choice(*state["way"])
            self._take(way._replace(compression=given_compression(a) or way.compression), resumed=True)
            a.algorithm.load_state(state)
            return
        self._pipe.load_state(state)
        if "record" in state:
            self._record.load_state(state["record"])
        self._slow_since = state.get("slow since", 0)
