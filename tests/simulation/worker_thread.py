"""A thread of a worker: a generator that goes on once what it waits for has come."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from dadt.errors import DadtError
from simulation.worker_script import Exit, Interrupted, ScriptError

if TYPE_CHECKING:
    from simulation.worker import Worker

Steps = Generator[Callable[["Wait"], None], Any, Any]
"""What a thread does: it yields what it waits for, and gets what that gives."""


class Late(Exception):
    """What is waited for is not there yet."""


class Wait:
    """One wait of a thread, which ends once."""

    __slots__ = ("number", "thread")

    def __init__(self, thread: Thread, number: int) -> None:
        self.thread, self.number = thread, number

    def give(self, value: Any = None) -> None:
        """End it with a value, or an error that is raised."""
        if self.thread.waits == self.number:
            self.thread.worker.process.get(lambda: self._end(value))

    def _end(self, value: Any) -> None:
        if self.thread.waits == self.number:
            self.thread.go_on(value)


class Thread:
    """One thread of a worker."""

    def __init__(self, worker: Worker, steps: Steps, end: Callable[[BaseException | None], None]) -> None:
        """end: called once it has ended, with what was not caught."""
        self.worker, self._steps, self._end = worker, steps, end
        self.waits = 0
        self.over = False

    def go_on(self, value: Any = None) -> None:
        if self.over:
            return
        self.waits += 1
        outer, self.worker.current = self.worker.current, self
        try:
            raises = isinstance(value, BaseException)
            what = self._steps.throw(value) if raises else self._steps.send(value)
        except StopIteration:
            self.over = True
            self._end(None)
        except (DadtError, ScriptError, Interrupted, Exit) as error:
            self.over = True
            self._end(error)
        else:
            what(Wait(self, self.waits))
        finally:
            self.worker.current = outer
