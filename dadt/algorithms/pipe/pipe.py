"""Pipe-SGD (arXiv:1811.03619): gradients are averaged while the next step computes, and applied one step late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from dadt.algorithms.pipe.divergence import FACTOR, Divergence
from dadt.algorithms.sync import Sync
from dadt.train.algorithm import Algorithm
from dadt.train.attachment import Attachment
from dadt.train.exchange.exchange import Exchange
from dadt.train.later import Later
from dadt.train.restored import RestoredExchange, flights

_PARTS, _PATIENCE = 4, 12
"""Points that each change of the set of trained parameters adds (each step subtracts one), and the points at which
training falls back to synchronous steps."""
_UNREAD = 3
"""Largest number of gradient norms not yet read from a GPU, which may still be computing them. If there are more, the
host waits for the oldest."""
_BLOWN_UP, _BARRED, _CHANGED = 1.0, 2.0, 3.0
"""Alarms that a rank sends to the other ranks: _BLOWN_UP if late gradients have grown too much, _BARRED if weights
cannot be predicted, and _CHANGED if the script changes predicted weights."""


class Pipe(Algorithm):
    """w(t+1) = optimizer(w(t), mean of g(t-1)), where g(t) was computed at predicted weights.

    The first `warmup_steps` steps are synchronous. The next step starts its exchange and applies nothing, not even zero
    gradients, so momentum, decay and step counters stay unchanged. Each later step applies the exchange that the step
    before started. The last exchange of the training is dropped on all ranks.

    During late steps each rank watches the norm of the averaged gradients. A rank that sees it diverge reports this in
    the metadata of its next exchange; when that exchange is applied, all ranks return to synchronous steps permanently.
    """

    survives = True

    attachment: Attachment

    def __init__(self, attachment: Attachment) -> None:
        super().__init__(attachment)
        config = attachment.ranks.config
        self._pending: Exchange | RestoredExchange | None = None
        """The exchange that an earlier step launched and that is not applied yet; None if there is no such exchange."""
        self._launched: Exchange | None = None
        self._before: Exchange | RestoredExchange | None = None
        """Value of `_pending` before the current step's `before_step` changed it; None outside of `before_step`."""
        self._missed: bool | None = None
        """Whether the ranks that have already averaged the coming step wait for this rank's gradients in it; None if no
        rank has averaged it yet."""
        self._holds = False
        self._divergence = Divergence() if config.fall_back else None
        self._norms: deque[tuple[Later, bool]] = deque()
        """Norms of recent averages, each with whether its gradients were late. A norm is read in a later step, when the
        GPU has computed it."""
        self._blown_up = False
        """Whether a norm that was read shows that late gradients blow up."""
        self._changes = 0
        """Points for recent changes of the trained parameters, see _PARTS."""
        self._warmed_up = False
        """Whether the warm-up, with its synchronous steps, is over."""
        self.waits = False
        """Whether steps stay synchronous, after the warm-up too, until `begin` is called."""
        self.ends: Callable[[], bool] = lambda: False
        """Callback in each step with late averages. It returns whether all ranks make this step a synchronous one,
        which drops the late averages."""
        self.stepped: Callable[[], None] = lambda: None
        """Callback after each optimizer step; `Auto` sets it to measure steps with late averages."""
        attachment.measure.why = f"the first {attachment.warmup_steps} steps are synchronous"

    @property
    def _warming_up(self) -> bool:
        a = self.attachment
        return self.waits or a.step < a.warmup_steps or a.has_closure

    @property
    def predicts(self) -> bool:
        return self._pending is not None and not self._warming_up

    @property
    def tracks(self) -> bool:
        # Prediction needs the weights before and after each step. It begins to record them in the last synchronous
        # steps, and continues in steps that the gradient scaler skips, since a gap would make it start again.
        a = self.attachment
        last = a.warmup_steps - a.prediction.needs <= a.step < a.warmup_steps
        first = a.step >= a.warmup_steps and a.prediction.sees_gradients
        return not a.has_closure and (self._pending is not None or last or first)

    @property
    def holds(self) -> bool:
        return self._holds

    def before_step(self) -> None:
        if not self._warmed_up and not self._warming_up:
            self.begin()
            self._report()
        if self._missed is not None:
            self._catch_up(self._missed)
            return
        exchange = self.launch()
        if self._warming_up:
            self.apply(exchange)
        else:
            self._step_late(exchange)
        self._before = None

    def launch(self) -> Exchange:
        """Start the exchange of this step's gradients, and return the exchange."""
        a = self.attachment
        if self._pending is not None:
            # Start the older exchange's second allreduce first. Otherwise it would queue behind the new exchange.
            self._pending.go_on()
        exchange = a.new_exchange()
        a.close(exchange, value=self._alarm())
        self._launched, self._before = exchange, self._pending
        return exchange

    @property
    def launched(self) -> Exchange | None:
        return self._launched

    @property
    def pending(self) -> Exchange | RestoredExchange | None:
        return self._pending if self._launched is None else self._before

    def regroup(self, behind: bool, keep: bool) -> Exchange | None:
        pending, launched, self._launched = self.pending, self._launched, None
        if behind:
            pending = None if self._warming_up else launched
            if launched is not None:
                self._hold()
            else:
                self._missed = keep
        self._pending = pending if keep or isinstance(pending, RestoredExchange) else None
        self._before = None
        return self._pending if isinstance(self._pending, Exchange) else None

    def _catch_up(self, waits: bool) -> None:
        """Make a step that other ranks have already made: its gradients are applied in the next step, and nothing is
        applied in this one. waits: whether the other ranks wait for this rank's gradients."""
        self._missed = None
        exchange = self.attachment.new_exchange()
        if waits:
            self.attachment.close(exchange)
            self._pending = exchange
        else:
            exchange.give_back()
        self._hold()

    def after_step(self) -> None:
        self._holds = False
        self.stepped()

    def begin(self) -> None:
        """Begin steps with late averages, because the synchronous warm-up steps are over. Called at the same step on
        all ranks."""
        self._warmed_up, self.waits = True, False
        self.attachment.measure.why = ""

    def _report(self) -> None:
        a = self.attachment
        if a.index == 0 and a.step > 1 and a.ranks.device is None:  # GPU times cannot be measured on the host
            exchange = sum(each.measure.exchange for each in a.siblings)
            a.ranks.say(a.measure.verdict(a.step, a.ranks.world.world_size, exchange))

    def step_synchronously(self, why: str) -> None:
        """Train synchronously in all following steps, like the algorithm `sync`."""
        a = self.attachment
        a.measure.why = why
        a.prediction.end()
        a.switch_to(Sync(a, watches=True), synchronous=True, in_flight=[])
        a.watch_gradients()

    def state(self) -> dict[str, Any]:
        a = self.attachment
        return {
            "synchronous": False,
            "in_flight": flights(a, self._pending),
            "measured": {} if self._warmed_up else a.measure.state(),
            "norms": [(norm.read(), late) for norm, late in self._norms],
            "changes": self._changes,
            "divergence": {} if self._divergence is None else self._divergence.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        if "synchronous" not in state:  # `auto` had chosen `local`, which has no exchange in flight
            self._pending = None
            return
        if state["synchronous"]:
            self.step_synchronously("as before its checkpoint was written")
            return
        self._warmed_up = not (state["measured"] or self.waits)
        if self._warmed_up:
            self.attachment.measure.why = ""
        if state["measured"]:
            self.attachment.measure.load_state(state["measured"])
        self._pending = RestoredExchange(self.attachment, state["in_flight"][-1]) if state["in_flight"] else None
        self._norms.clear()
        # A checkpoint of an older DADT version contains a single norm instead of a list.
        before = [(state["norm"], state["late"])] if state.get("norm") is not None else []
        for value, late in state.get("norms", before):
            self._norms.append((Later(torch.tensor(value, dtype=torch.float64, device="cpu")), late))
        self._changes = state.get("changes", 0)
        if self._divergence is not None and state["divergence"]:
            self._divergence.load_state(state["divergence"])

    def apply(self, exchange: Exchange) -> None:
        """Make this step synchronous: wait for the step's exchange, which has been started, and apply its averages at
        once."""
        a = self.attachment
        # If the script begins to use closures late, the exchange in flight is older than the closure's gradients, so it
        # is dropped.
        self._pending = None
        lanes = exchange.receive()
        if a.weighing.agree(lanes):
            self._launched = exchange = a.new_exchange(again=True)
            a.close(exchange)
            lanes = exchange.receive()
        self._launched = None
        a.agree(lanes, exchange)
        if a.finite.judge(lanes, exchange):
            self._deliver(exchange, late=False)
        else:
            self._hold()

    def _step_late(self, exchange: Exchange) -> None:
        # The new exchange starts before the wait for the old one, so the network stays busy if communication is slower
        # than computing.
        a = self.attachment
        oldest, self._pending = self._pending, exchange
        if a.ranks.survives and not isinstance(oldest, Exchange):
            # This allgather keeps every rank less than two steps ahead of any other, because a rank two steps behind
            # could not catch up after a loss of ranks.
            a.ranks.wait(a.ranks.allgather(f"{exchange.name}, the first late one", b""))
        if oldest is None:
            self._launched = None
            a.measure.delayed += 1
            self._hold()
            return
        lanes = oldest.receive()
        self._launched = None
        a.measure.delayed += 1
        alarm = self._agreed(max([lane.value for lane in lanes]))
        self._count_changes(oldest, exchange)
        applies = a.finite.judge(lanes, oldest) and _trains(oldest)
        if alarm or self._changes >= _PATIENCE:
            a.agree(lanes, oldest)
            self._fall_back(exchange, alarm)
        elif self.ends():
            a.agree(lanes, oldest)
            self.apply(exchange)
        elif applies:
            self._deliver(oldest, late=True)
            a.agree(lanes, oldest)
        else:
            a.agree(lanes, oldest)
            self._hold()

    def _hold(self) -> None:
        """Let this step apply no gradients, so that it changes no weights."""
        self._holds = True
        self.attachment.zero_gradients()

    def _count_changes(self, before: Exchange | RestoredExchange, latest: Exchange) -> None:
        """Count whether the trained parameters have changed since the exchange `before`. All ranks count alike, as
        their exchanged metadata ensures that they train the same parameters."""
        self._changes = max(self._changes - 1, 0)
        if before.schema is not latest.schema or before.frozen != latest.frozen:
            old = {id(p) for p in before.parameters} - before.frozen
            self._changes += _PARTS * any(id(p) not in old | latest.frozen for p in latest.parameters)

    def _agreed(self, alarm: float) -> float:
        """Return the alarm that all ranks of the job act on in this step. alarm: that of the ranks that average with
        this one. In islands gradients of other ranks, which have other parts, may not blow up, so all ranks find a step
        for that."""
        a = self.attachment
        ranks, key = a.ranks, f"synchronous steps{a.name}"
        if ranks.world.parts == 1 or ranks.control is None or not ranks.deaths.listening:
            return alarm
        if alarm == _BLOWN_UP:
            ranks.control.propose(key, ranks.generation)
            alarm = 0.0
        return _BLOWN_UP if ranks.requests.is_due(key, ranks.step) else alarm

    def _fall_back(self, exchange: Exchange, alarm: float) -> None:
        """Train synchronously from this step on. This step's exchange, the last one under way, is received and applied
        at once."""
        a = self.attachment
        a.measure.delayed -= 1
        a.measure.fell_back += 1
        a.ranks.say(f"step {a.step}: {_reason(alarm, a.name)}", level="warning")
        self.step_synchronously(f"fell back at step {a.step}: {_WHY[alarm]}")
        lanes = exchange.receive()
        a.agree(lanes, exchange)
        if _CHANGED in (alarm, *(lane.value for lane in lanes)):
            # The weights may contain values that each rank computed from its own predicted weights, so all ranks take
            # rank 0's.
            a.replicas.take_first(a, weights=True)
        a.deliver(exchange)

    def _deliver(self, exchange: Exchange | RestoredExchange, late: bool) -> None:
        if self._divergence is not None:
            self._norms.append((Later(exchange.norm()), late))
        self.attachment.measure.late = int(late)
        self.attachment.deliver(exchange)
        self.attachment.prediction.arrived(exchange.scale)

    def _alarm(self) -> float:
        """Return the reason for which all ranks should return to synchronous steps; 0 if there is none."""
        blown_up, prediction = self._blows_up(), self.attachment.prediction
        if prediction.changed or prediction.barred:
            return _CHANGED if prediction.changed else _BARRED
        return _BLOWN_UP * blown_up

    def _blows_up(self) -> bool:
        """Whether the norms of the last steps' averages show that gradients blow up. Ranks may see it at different
        steps, because a norm's last bits differ between processors."""
        norms = self._norms
        while norms and (len(norms) > _UNREAD or norms[0][0].done):
            self._look_at(*norms.popleft())
        blown_up, self._blown_up = self._blown_up, False
        return blown_up

    def _look_at(self, norm: Later, late: bool) -> None:
        if self._divergence is None:
            return
        value = norm.read()
        if not late:
            self._divergence.learn(value)
        # With a GradScaler, a step with an infinite norm was skipped by the optimizer, so its norm does not count.
        elif value - value == 0 or self.attachment.scale is None:
            self._blown_up |= self._divergence.see(value)


_WHY = {
    0.0: "the script trains other parameters every few steps",
    _BLOWN_UP: "late gradients grew",
    _BARRED: "weights could not be predicted",
    _CHANGED: "the script changes predicted weights",
}
"""Short texts, by alarm, that explain why ranks returned to synchronous steps."""


def _trains(oldest: Exchange | RestoredExchange) -> bool:
    """Whether the optimizer still trains any parameter of the received exchange."""
    if isinstance(oldest, RestoredExchange):
        return bool(oldest.averaged_gradients())
    return any(p.requires_grad or id(p) in oldest.frozen for p in oldest.parameters)


def _reason(alarm: float, name: str) -> str:
    """Return the text for the user that explains why ranks return to synchronous steps."""
    if alarm == _CHANGED:
        return (
            f"the script changes weights{name} between a forward and its step, where they are predicted ones and"
            " are put back: back to synchronous steps on all ranks, so that such changes last. Make them right"
            " after optimizer.step() to train one step late"
        )
    if alarm == _BARRED:
        return (
            f"the forward of the model{name} runs within the backward (a checkpoint of the whole model), where its"
            " weights cannot be predicted: back to synchronous steps on all ranks. Give checkpoint use_reentrant=False"
            " to train one step late"
        )
    if alarm == _BLOWN_UP:
        return (
            f"the gradients{name} have grown beyond {FACTOR:g} times what they were, as late ones can: back to"
            " synchronous steps on all ranks. Lower the learning rate or raise --warmup-steps (--no-fall-back goes on"
            " regardless)"
        )
    return (
        f"the script trains other parameters{name} every few steps, so late gradients come to what is frozen: back to"
        " synchronous steps on all ranks"
    )
