"""Runs collectives between ranks that all submit them in the same order."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

from dadt import _core
from dadt._core import Engine
from dadt.comm.collectives.operation import Operation, Work
from dadt.comm.executors.base import Connection, PointToPoint
from dadt.comm.keepalive import KeepAlive


class Pending:
    """An operation in progress. Any thread may call `wait`, any number of times; the first call produces the result."""

    def __init__(self, work: Work, call: Operation) -> None:
        self._work = work
        self._call: Operation | None = call
        self._result: Any = None
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether the bytes have moved; `wait` still has to be called to produce the result."""
        return self._work.done

    def wait(self, timeout: float) -> Any:
        """Wait for and return the operation's result. Raises the C++ engine's first error, or CommTimeout after
        `timeout` seconds."""
        self._work.wait(timeout)
        with self._lock:
            if self._call is not None:
                self._result = self._call.finish(self._work)
                self._call = None
        return self._result


class OrderedGroup:
    """One rank of a group that exchanges tensors. All ranks must submit operations in the same order; any thread may
    submit."""

    def __init__(self, connection: Connection, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.connection = connection
        self.calls = 0
        """Number of operations that this rank has started in the group."""
        self._kept = KeepAlive(lambda: connection.failed)

    @property
    def mail(self) -> PointToPoint:
        return self.connection.mail

    def submit(self, call: Operation) -> Pending:
        """Start the operation without waiting for it."""
        self.calls += 1
        # All ranks compare the operation's name, which includes the call's number and signature, because scripts may
        # differ in the order or the arguments of their calls.
        engine = self.connection.engine_of(call.kind)
        work = start(engine, call, f"call {self.calls}, {call.signature}")
        self._kept.add(work, call)
        return Pending(work, call)

    def abort(self, reason: str, lost: bool = False) -> None:
        """Fail all pending and future operations on this rank and, if the executor supports this, on its peers. lost:
        whether the reason is a lost rank. May be called from any thread."""
        if lost:
            self.connection.abort(reason, lost)
        else:
            self.connection.engine.abort(reason)

    def close(self, timeout: float) -> None:
        """Wait for pending operations, then close the connection. Raises CommTimeout if that takes longer than
        `timeout` seconds."""
        with ExitStack() as stack:
            stack.callback(self._kept.close)
            stack.callback(self.connection.close)
            self.connection.engine.close(timeout)


def start(engine: Engine, call: Operation, name: str) -> _core.Work:
    """Submit the operation to a C++ engine and return the engine's work handle. name: text that all ranks compare."""
    if call.kind == "exchange":
        return engine.exchange(call.sends, call.receives, name, unsure=True)
    assert call.layout is not None
    if call.kind == "broadcast":
        return engine.broadcast(call.layout, call.inputs, call.root, name, unsure=True)
    return engine.allreduce(call.layout, call.inputs, call.outputs, name, reduction=call.reduction, unsure=True)
