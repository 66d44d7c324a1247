"""Which threads count as those that move data between ranks, and what they have used."""

from __future__ import annotations

import threading
import time

from dadt import _core
from dadt_cli.bench.transport_time import TransportThreads, between


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def in_a_thread(name: str, seconds: float, stop: threading.Event) -> threading.Thread:
    def run() -> None:
        compute(seconds)
        done.set()
        stop.wait()

    done = threading.Event()
    thread = threading.Thread(target=run, name=name)
    thread.start()
    done.wait()
    return thread


def test_threads_that_move_data_are_told_from_those_that_compute() -> None:
    threads, stop = TransportThreads(), threading.Event()
    assert between({}, threads.seconds()) is None
    engine = _core.Engine(_core.NullExecutor(0, 1), 0, 1, 10.0)
    before = threads.seconds()
    assert len(before) == 1
    started = [in_a_thread("dadt-hierarchical", 0.2, stop), in_a_thread("dadt-background", 0.4, stop)]
    with threads.starting():
        started.append(in_a_thread("of a library", 0.1, stop))
    compute(0.3)
    used = between(before, threads.seconds())
    stop.set()
    for each in started:
        each.join()
    engine.close(10.0)
    assert used is not None and 0.3 <= used < 0.4
