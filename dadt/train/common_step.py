"""Finds a step that all ranks of a job have yet to complete, while they train on.

What all ranks are to do behind the same step they tell each other with the exchange of a step, where there is one. In
islands that connects only ranks that hold the same part of the model, and with `local` not each step has one. There
they agree over the launcher. Each tells the others how many steps it had completed when it heard of that,
and ends no further step before it has their answers. So no rank has completed the step after the largest of these
numbers.

A rank that waits for these answers holds up all others, so each search must come to an end by itself. It belongs to
one generation of ranks: the newest that this rank had heard of when it heard what the step is for. All ranks of a
generation hear the same in it, since an agent passes on frames in the launcher's order, and repeats those of the newest
generation to a rank that begins to listen later. They hear it on a thread that waits for no step, so all look for the
same steps at once, however far each of them has come. The launcher lets only ranks of the current generation look, and
refuses all of them where one has ended or says nothing, or as soon as the next generation begins. No search of all
ranks is repeated in that one: requests of new workers are sent again there, and a signal that no step is found for
comes by itself. A search of an island is repeated, as its ranks are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from dadt.errors import DadtError


class Exchange(Protocol):
    """Exchanges bytes with all ranks of a generation (WorkerLine.exchange), or only with those of this rank's island:
    takes a key, this rank's bytes, the seconds to wait for the others, and the generation's number. Raises
    DadtError."""

    def __call__(
        self, key: str, blob: bytes, timeout: float, generation: int = 0, *, island: bool = False
    ) -> list[bytes]: ...


class Due:
    """The step after which all ranks do something, once it is found."""

    def __init__(self) -> None:
        self._step: int | None = None

    def agree_on(self, step: int) -> None:
        """Note the number of the step, unless one was found before. Any thread may call this."""
        if self._step is None:
            self._step = step

    def has_come(self, step: int) -> bool:
        """Return whether it has come. step: number of steps that are complete."""
        return self._step is not None and step >= self._step


class CommonStep:
    """One rank's part in finding such steps. `find` runs on the thread that listens to the agent, `stepped` on the
    training thread."""

    def __init__(
        self, exchange: Exchange, await_newer: Callable[[int, float], int], step: int, *, in_islands: bool = False
    ) -> None:
        """await_newer: function that waits up to so many seconds for a generation above a number, and returns the
        number of the newest one that this rank has heard of. step: number of steps that this rank has completed.
        in_islands: whether the launcher divides ranks into islands."""
        self._exchange, self._await_newer = exchange, await_newer
        self.in_islands = in_islands
        self.step = step
        """Number of steps that this rank has completed."""
        self._searches = 0
        """Number of steps that are being found."""
        self._news = threading.Condition()

    def find(self, key: str, seconds: float, found: Callable[[int], None]) -> None:
        """Call `found` with the number of the step, in another thread. It is called on all ranks that train or, if some
        do not look for the same step within so many seconds or are lost meanwhile, on none of those left. key: the
        step's purpose, the same on all ranks, once in each generation."""
        self._begin(key, seconds, found, None)

    def find_in_island(
        self, key: str, seconds: float, found: Callable[[int], None], missed: Callable[[], None]
    ) -> None:
        """As `find`, for the ranks of this rank's island alone. Where it calls `found` on none of them, it calls
        `missed`. key: the step's purpose, the same on all ranks of the island, once in a job."""
        self._begin(key, seconds, found, missed)

    def _begin(self, key: str, seconds: float, found: Callable[[int], None], missed: Callable[[], None] | None) -> None:
        with self._news:
            self._searches += 1
        search = f"step of {key}", seconds, self._await_newer(0, 0.0), found, missed
        threading.Thread(target=self._find, args=search, name="dadt-common-step", daemon=True).start()

    def _find(
        self,
        key: str,
        seconds: float,
        generation: int,
        found: Callable[[int], None],
        missed: Callable[[], None] | None,
    ) -> None:
        """Find a step with the ranks of the island if `missed` is given, else with all ranks."""
        until, before = monotonic() + seconds, -1
        steps: list[int] = []
        while not steps and generation > before:
            try:
                told = self._exchange(key, str(self.step).encode(), seconds, generation, island=missed is not None)
                steps = [int(each) for each in told]
            except DadtError:  # ranks are lost or join, a rank says nothing, or the job ends
                before, seconds = generation, max(0.0, until - monotonic())
                if missed is not None:
                    generation = self._await_newer(before, seconds)
                    seconds = max(0.0, until - monotonic())
        with self._news:
            self._searches -= 1
            if steps:
                found(max(steps) + 1)
            self._news.notify_all()
        if missed is not None and not steps:
            missed()

    def stepped(self, step: int) -> None:
        """Called when a step is complete: wait while a step is being found. step: number of steps that are complete."""
        with self._news:
            self.step = step
            self._news.wait_for(lambda: not self._searches)  # no longer than the exchange waits for the others
