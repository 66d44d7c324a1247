"""Threads of the code under test in a simulated world: real ones, of which one at a time runs, and in virtual time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from simulation.world import Process, World

FOR_EVER = 1e12
SWITCH_SECONDS = 2e-5


class StrandEnded(BaseException):
    """The process of this thread has ended, or the simulation is over."""


class Strand:
    """One thread. It runs from one wait to the next, while the world stands still."""

    def __init__(self, strands: Strands, process: Process, name: str, run: Callable[[], None]) -> None:
        self._strands, self.process, self.name = strands, process, name
        self._run = run
        self._may_run = threading.Semaphore(0)
        self._number = 0
        self._ends = False
        self.over = False
        self.error: BaseException | None = None
        self.done = WaitPoint(strands)
        self._thread = threading.Thread(target=self._body, name=name, daemon=True)
        self._thread.start()
        strands.all.append(self)
        self.wake_after(strands.world.spread(SWITCH_SECONDS))

    def _body(self) -> None:
        self._may_run.acquire()
        try:
            if not self._ends:
                self._run()
        except StrandEnded:
            pass
        except BaseException as error:
            self.error = error
        self.over = True
        self.done.change()
        self._strands.back.release()

    def wake_after(self, seconds: float) -> None:
        """Go on after so many seconds, unless it has gone on before."""
        number = self._number
        self.process.after(seconds, lambda: self._go_on(number))

    def _go_on(self, number: int) -> None:
        if number == self._number and not self.over and self.process.alive:
            self.resume()

    def resume(self) -> None:
        """Let it run up to its next wait."""
        self._number += 1
        outer, self._strands.current = self._strands.current, self
        self._may_run.release()
        self._strands.back.acquire()
        self._strands.current = outer
        if self.error is not None and not self._ends:
            raise self.error

    def pause(self) -> None:
        """Called by the thread itself: wait until it is woken."""
        if self._ends:
            raise StrandEnded
        self._strands.back.release()
        self._may_run.acquire()
        if self._ends:
            raise StrandEnded

    def end(self) -> None:
        if not self.over:
            self._ends = True
            self.resume()
        self._thread.join()


class WaitPoint:
    """Something that threads wait for."""

    def __init__(self, strands: Strands) -> None:
        self._strands = strands
        self._waiting: list[Strand] = []

    def change(self) -> None:
        """It may have come true: those that wait look again."""
        waiting, self._waiting = self._waiting, []
        for strand in waiting:
            strand.wake_after(self._strands.world.spread(SWITCH_SECONDS))

    def wait(self, is_true: Callable[[], bool], seconds: float | None = None) -> bool:
        """Let this thread wait for that, and for `seconds` seconds at most."""
        strands = self._strands
        strand, world = strands.current, strands.world
        assert strand is not None, "only threads may wait"
        deadline = world.now + (FOR_EVER if seconds is None else max(0.0, seconds))
        while not is_true():
            if world.now >= deadline:
                return False
            self._waiting.append(strand)
            if deadline - world.now < FOR_EVER / 2:
                strand.wake_after(deadline - world.now)
            strand.pause()
            if strand in self._waiting:
                self._waiting.remove(strand)
        return True


class Strands:
    """All threads of a world, and what stands for Python's modules in the code that they run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.all: list[Strand] = []
        self.current: Strand | None = None
        self.back = threading.Semaphore(0)
        self._never = WaitPoint(self)

    def start(self, process: Process, name: str, run: Callable[[], None]) -> Strand:
        return Strand(self, process, name, run)

    def as_thread(self, process: Process, name: str, run: Callable[[], object]) -> None:
        """Do this in a thread of its own, as only threads may wait and start others."""
        Strand(self, process, name, lambda: (run(), None)[1])

    def sleep(self, seconds: float) -> None:
        self._never.wait(lambda: False, seconds)

    def monotonic(self) -> float:
        return self.world.now

    def end(self) -> None:
        for strand in self.all:
            strand.end()

    @contextmanager
    def patched(self, *modules: Any) -> Iterator[None]:
        """In these modules time is this world's, and so are threads and queues."""
        threads = SimulatedThreading(self)
        with_names = {
            "monotonic": self.monotonic,
            "perf_counter": self.monotonic,
            "threading": threads,
            "queue": SimulatedQueues(self),
            "time": SimulatedTime(self),
        }
        patches = [patch.object(m, name, new) for m in modules for name, new in with_names.items() if hasattr(m, name)]
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()


class SimulatedTime:
    """Stands for the module `time`."""

    def __init__(self, strands: Strands) -> None:
        self.sleep, self.monotonic, self.time = strands.sleep, strands.monotonic, strands.monotonic


class SimulatedQueues:
    """Stands for the module `queue`."""

    Empty = queue.Empty

    def __init__(self, strands: Strands) -> None:
        self.SimpleQueue = lambda: SimulatedQueue(strands)


class SimulatedQueue:
    """Stands for a queue.SimpleQueue."""

    def __init__(self, strands: Strands) -> None:
        self._changed = WaitPoint(strands)
        self._items: list[Any] = []

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._changed.change()

    def get(self, timeout: float | None = None) -> Any:
        if not self._changed.wait(lambda: bool(self._items), timeout):
            raise queue.Empty
        return self._items.pop(0)


class SimulatedThreading:
    """Stands for the module `threading`. Locks are real, as no thread waits while it holds one."""

    Lock = staticmethod(threading.Lock)

    def __init__(self, strands: Strands) -> None:
        self._strands = strands

    def current_thread(self) -> Any:
        return self._strands.current

    def Thread(
        self, target: Callable[..., None], args: tuple[Any, ...] = (), name: str = "", daemon: bool = False
    ) -> Any:
        assert self._strands.current is not None, "threads start threads"
        return SimulatedThread(self._strands, self._strands.current.process, name, lambda: target(*args))

    def Condition(self, lock: Any = None) -> Any:
        return SimulatedCondition(self._strands)

    def Event(self) -> Any:
        return SimulatedEvent(self._strands)


class SimulatedThread:
    """Stands for a threading.Thread."""

    def __init__(self, strands: Strands, process: Process, name: str, run: Callable[[], None]) -> None:
        self._strands, self._process, self._name, self._run = strands, process, name, run
        self._strand: Strand | None = None

    def start(self) -> None:
        self._strand = self._strands.start(self._process, self._name, self._run)

    def join(self, timeout: float | None = None) -> None:
        strand = self._strand
        assert strand is not None
        strand.done.wait(lambda: strand.over, timeout)

    def is_alive(self) -> bool:
        return self._strand is not None and not self._strand.over

    def __eq__(self, other: object) -> bool:
        return other is self or (other is not None and other is self._strand)

    def __hash__(self) -> int:
        return id(self)


class SimulatedCondition:
    """Stands for a threading.Condition: one thread runs at a time, so that it needs no lock."""

    def __init__(self, strands: Strands) -> None:
        self._changed = WaitPoint(strands)

    def __enter__(self) -> SimulatedCondition:
        return self

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None:
        self._changed.change()

    def wait_for(self, is_true: Callable[[], bool], timeout: float | None = None) -> bool:
        return self._changed.wait(is_true, timeout)


class SimulatedEvent:
    """Stands for a threading.Event."""

    def __init__(self, strands: Strands) -> None:
        self._changed = WaitPoint(strands)
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._changed.change()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._changed.wait(lambda: self._set, timeout)
