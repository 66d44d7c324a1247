"""Computes the weight of a rank's gradient in the mean over ranks, which is smaller if the batches of its step are not
full."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary
from zlib import crc32

_RECENT = 64
MOST_AHEAD = 2
"""Maximum number of batches that a script may fetch before it trains on them. Accelerate, for example, fetches one
ahead."""


class Pass:
    """One pass over a loader that all ranks share."""

    def __init__(self, name: str) -> None:
        """name: name of the loader in messages to the user."""
        self.name = name
        self.order = 0
        """crc32 of the sample indices in the first batch of all ranks; 0 if the loader has no order."""
        self.ahead: int | None = None
        """Number of batches that the script fetches before it trains on them; None if not known yet."""
        self.is_over = False


class BatchWeight:
    """Weight of one optimizer's gradient, computed from the sizes of the batches that shared loaders return to the
    script."""

    def __init__(self, backwards: Callable[[], int]) -> None:
        """backwards: function that returns how many backward passes the script has begun so far."""
        self.drawn = 0
        """Number of batches drawn since the last exchange."""
        self.order = 0
        """crc32 over the sample orders of all passes that began since the last exchange; 0 if no loader has an order.
        """
        self.begun = ""
        """Name of the loader whose pass began last."""
        self._backwards = backwards
        self._passes: WeakKeyDictionary[Pass, _Drawn] = WeakKeyDictionary()
        self._recent: deque[Pass] = deque(maxlen=_RECENT)
        """Passes from which batches were drawn since the last exchange. These references keep the passes alive, as
        `next(iter(loader))` drops its pass at once."""
        self._last = 1.0
        self._fills_up = False
        """Whether the weight becomes 1 again from the next step on, unless that step has a batch."""

    @property
    def value(self) -> float:
        """Weight of the coming step's gradient in the mean, usually from 0 to 1. A step without a new batch has the
        previous step's weight."""
        if not self._passes:
            return self._last
        now = self._backwards()
        fills = [fill for each, drawn in self._passes.items() for fill in drawn.due(each, now)]
        return sum(fills) / len(fills) if fills else self._last

    def fill(self, backward: int) -> float:
        """Return the weight of one backward pass of the coming step, which is the share of a full batch that it trains
        on, if each backward is for one batch. backward: the backward's number in the step."""
        now = self._backwards()
        batches = [due for each, drawn in self._passes.items() if (due := drawn.due(each, now))]
        return batches[0][backward] if len(batches) == 1 and backward < len(batches[0]) else self.value

    def drew(self, source: Pass, samples: int, nominal: int) -> None:
        """Record a batch that a shared loader returns to the script. samples: number of the batch's samples that count;
        nominal: number of samples in a full batch."""
        self._fills_up = False
        self.drawn += 1
        self._recent.append(source)
        if (drawn := self._passes.get(source)) is None:
            drawn = self._passes[source] = _Drawn(self._backwards())
            self.order, self.begun = crc32(source.order.to_bytes(4, "little"), self.order), source.name
        drawn.add(samples / max(nominal, 1))

    def pass_over(self, source: Pass) -> None:
        """Record the end of a pass over a shared loader. Later steps without a new batch have weight 1, because it is
        unknown which old batches the script reuses in them."""
        if (drawn := self._passes.get(source)) is not None and drawn.fills:
            self._fills_up = True  # batches fetched since the last step are still to be trained on
            self._recent.append(source)
        else:
            self._last = 1.0

    def exchanged(self) -> None:
        """Count the batches that an exchange covers as trained on. Called when the exchange begins."""
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
    """Batches that one pass over a loader has returned and that an optimizer has not been trained on yet."""

    def __init__(self, backwards: int) -> None:
        self.fills: list[float] = []
        self._began = backwards
        self._since = 0
        """Number of batches drawn since the last exchange."""
        self._first = self._each = 0
        """Number of batches drawn before the first exchange, and number of batches that the last exchange covered."""

    def add(self, fill: float) -> None:
        self.fills.append(fill)
        self._since += 1

    def due(self, source: Pass, backwards: int) -> list[float]:
        """Return, for each batch that the coming exchange covers, its share of a full batch; 1 is a full batch."""
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
            # So far, each batch has had one backward pass; batches beyond the number of backward passes were fetched
            # ahead.
            left = self._since - (backwards - self._began) if backwards > self._began else 0
            return left if 0 < left <= MOST_AHEAD else 0
        if self._since >= self._first > 0:
            # No batch was fetched ahead, because as many batches were drawn as before the first exchange, and one step
            # trains on all of them.
            return 0
        return source.ahead
