"""The weight of a rank's gradient in the mean: how full the batches of its step are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary
from zlib import crc32

_RECENT = 64
MOST_AHEAD = 2
"""Batches that a script may hold back: Accelerate fetches one before it gives the one before."""


class Pass:
    """One pass over a shared loader."""

    def __init__(self, name: str) -> None:
        """name: what messages call the loader."""
        self.name = name
        self.order = 0
        """crc32 of the first batch's samples, those of all ranks; 0 where the loader has no order."""
        self.ahead: int | None = None
        """Batches that the script fetches before it trains on them; None: not known yet."""
        self.is_over = False


class BatchWeight:
    """The weight for one optimizer, by the batches that shared loaders hand to the script."""

    def __init__(self, backwards: Callable[[], int]) -> None:
        """backwards: returns how many backward passes the script has begun so far."""
        self.drawn = 0
        """Batches since the last exchange."""
        self.order = 0
        """crc32 of the orders of passes over loaders that began since the last exchange; 0: none has one."""
        self.begun = ""
        """The name of the loader whose pass began last."""
        self._backwards = backwards
        self._passes: WeakKeyDictionary[Pass, _Drawn] = WeakKeyDictionary()
        self._recent: deque[Pass] = deque(maxlen=_RECENT)
        """Passes drawn from since the last exchange, kept as a script may drop them at once: `next(iter(loader))`."""
        self._last = 1.0
        self._fills_up = False
        """Whether the weight is 1 again from the next step on, unless that step has a batch."""

    @property
    def value(self) -> float:
        """The weight of the coming step's gradient. A step that has no batch of its own has that of the step before."""
        if not self._passes:
            return self._last
        now = self._backwards()
        fills = [fill for each, drawn in self._passes.items() for fill in drawn.due(each, now)]
        return sum(fills) / len(fills) if fills else self._last

    def drew(self, source: Pass, samples: int, nominal: int) -> None:
        """A batch of a shared loader was handed to the script. samples: those that count; nominal: a full one's."""
        self._fills_up = False
        self.drawn += 1
        self._recent.append(source)
        if (drawn := self._passes.get(source)) is None:
            drawn = self._passes[source] = _Drawn(self._backwards())
            self.order, self.begun = crc32(source.order.to_bytes(4, "little"), self.order), source.name
        drawn.add(samples / max(nominal, 1))

    def pass_over(self, source: Pass) -> None:
        """A shared loader has come to its end: a step that is without a batch (the script repeats those that it has
        kept) counts in full, as it is not known which one it takes."""
        if (drawn := self._passes.get(source)) is not None and drawn.fills:
            self._fills_up = True  # what was fetched since the last step is still to be used
            self._recent.append(source)
        else:
            self._last = 1.0

    def exchanged(self) -> None:
        """The gradients of what is due are on their way."""
        self.drawn = self.order = 0
        if not self._passes:
            return
        self._last, now = self.value, self._backwards()
        for each, drawn in self._passes.items():
            drawn.exchanged(each, now)
        self._recent.clear()

    def stepped(self) -> None:
        if self._fills_up and not any(drawn.fills for drawn in self._passes.values()):
            self._last, self._fills_up = 1.0, False


class _Drawn:
    """The batches of one pass that an optimizer has not been trained on."""

    def __init__(self, backwards: int) -> None:
        self.fills: list[float] = []
        self._began = backwards
        self._since = 0
        """Batches since the last exchange."""
        self._first = self._each = 0
        """Batches drawn before the first exchange, and batches that the last exchange was about."""

    def add(self, fill: float) -> None:
        self.fills.append(fill)
        self._since += 1

    def due(self, source: Pass, backwards: int) -> list[float]:
        """How full each batch is that the coming exchange is about; 1 is full."""
        return self.fills[: max(len(self.fills) - self._ahead(source, backwards), 0)]

    def exchanged(self, source: Pass, backwards: int) -> None:
        due = self.due(source, backwards)
        source.ahead = self._ahead(source, backwards) if not source.is_over else source.ahead
        self._each = len(due) or self._each
        self._first = self._first or self._since
        self._since = 0
        del self.fills[: len(due)]

    def _ahead(self, source: Pass, backwards: int) -> int:
        if source.is_over:
            return max(len(self.fills) - self._each, 0) if source.ahead else 0
        if source.ahead is None:
            # Each batch has had a backward but for those that the script holds back.
            left = self._since - (backwards - self._began) if backwards > self._began else 0
            return left if 0 < left <= MOST_AHEAD else 0
        if self._since >= self._first > 0:
            return 0  # as many for each step as before the first: they are trained on together
        return source.ahead
