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
refuses all of them where one has ended or says nothing, or as soon as the next generation begins. No search is repeated
in that one: requests of new workers are sent again there, and a signal that no step is found for comes by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from dadt.errors import DadtError


class Exchange(Protocol):
    """Exchanges bytes with all ranks of a generation (WorkerLine.exchange): takes a key, this rank's bytes, the seconds
    to wait for the others, and the generation's number. Raises DadtError."""

    def __call__(self, key: str, blob: bytes, timeout: float, generation: int = 0) -> list[bytes]: ...


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

    def __init__(self, exchange: Exchange, newest: Callable[[], int], step: int) -> None:
        """newest: function that returns the number of the newest generation that this rank has heard of. step: number
        of steps that this rank has completed."""
        self._exchange, self._newest = exchange, newest
        self._step = step
        """Number of steps that this rank has completed."""
        self._searches = 0
        """Number of steps that are being found."""
        self._news = threading.Condition()

    def find(self, key: str, seconds: float, found: Callable[[int], None]) -> None:
        """Call `found` with the number of the step, in another thread. It is called on all ranks that train or, if some
        do not look for the same step within so many seconds or are lost meanwhile, on none of those left. key: the
        step's purpose, the same on all ranks, once in each generation."""
        with self._news:
            self._searches += 1
            search = f"step of {key}", str(self._step).encode(), seconds, self._newest()
        threading.Thread(target=self._find, args=(found, *search), name="dadt-common-step", daemon=True).start()

    def _find(self, found: Callable[[int], None], key: str, told: bytes, seconds: float, generation: int) -> None:
        try:
            steps = [int(each) for each in self._exchange(key, told, seconds, generation)]
        except DadtError:  # ranks are lost or join, a rank says nothing, or the job ends
            steps = []
        with self._news:
            self._searches -= 1
            if steps:
                found(max(steps) + 1)
            self._news.notify_all()

    def stepped(self, step: int) -> None:
        """Called when a step is complete: wait while a step is being found. step: number of steps that are complete."""
        with self._news:
            self._step = step
            self._news.wait_for(lambda: not self._searches)  # no longer than the exchange waits for the others
