"""Pipe-SGD of width 2 (arXiv:1811.03619): gradients are averaged one step late, behind the next step's compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dadt.algorithms.base import Algorithm

if TYPE_CHECKING:
    from dadt.attachment import Attachment
    from dadt.exchange import Exchange


class Pipe(Algorithm):
    """w(t+1) = optimizer(w(t), mean of g(t-1)), where g(t-1) was computed at predicted weights.

    The first `warmup_steps` steps are synchronous. The step after them launches its exchange and applies nothing (not
    zeros: momentum, decay and counters stand still); from then on each step applies what the step before launched.
    The last gradient of the training is averaged and dropped, on all ranks.
    """

    def __init__(self, attachment: Attachment) -> None:
        super().__init__(attachment)
        self._pending: Exchange | None = None
        self._holds = False

    @property
    def _warming_up(self) -> bool:
        return self.attachment.step < self.attachment.warmup_steps or self.attachment.has_closure

    @property
    def predicts(self) -> bool:
        return self._pending is not None and not self.attachment.has_closure

    @property
    def tracks(self) -> bool:
        # From the last synchronous step on; the step that applies nothing must not erase what is known.
        a = self.attachment
        return not a.has_closure and (self._pending is not None or a.step == a.warmup_steps - 1)

    @property
    def holds(self) -> bool:
        return self._holds

    def before_step(self) -> None:
        a = self.attachment
        exchange = a.new_exchange()
        a.close(exchange)
        if self._warming_up:
            # Where a closure comes late, what is in flight is older than what it has computed.
            self._pending = None
            a.agree(a.wait(exchange), exchange)
            a.deliver(exchange)
            return
        # Launch before waiting: the wire stays busy where communication is slower than compute.
        previous, self._pending = self._pending, exchange
        a.measure.delayed += 1
        if previous is None:
            self._holds = True
            a.zero_gradients()
            return
        lanes = a.wait(previous)
        a.deliver(previous)
        a.agree(lanes, previous)

    def after_step(self) -> None:
        self._holds = False
