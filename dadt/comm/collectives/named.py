"""Collectives on named tensors: ranks submit tensors in any order from any thread; rank 0 negotiates one order for all
ranks, and small tensors are fused."""

from __future__ import annotations

import faulthandler
import hmac
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from dadt import _core
from dadt.comm.collectives.operation import Operation
from dadt.comm.collectives.ordered import Pending
from dadt.comm.executors import sockets
from dadt.comm.executors.base import Connection, PointToPoint
from dadt.comm.executors.meet import Meet, attend
from dadt.comm.keepalive import KeepAlive
from dadt.config import Config
from dadt.config.link import pace_of
from dadt.control.accept import MOST_UNPROVED, Entrance
from dadt.errors import CommError, StartTimeout
from dadt.world import World, ranked

_USE = "negotiation"
_TOKEN_BYTES = 32
_RANK = struct.Struct("<I")
_GREETING_BYTES = _TOKEN_BYTES + _RANK.size
_DUMP = "dump"
Start = Callable[[_core.Negotiation], None]
_MOST_TOLD = 8
"""Largest number of tensors that a rank names when several stall at the same time; it only counts the others."""


class Named:
    """One rank's collectives on named tensors. Methods may be called from any thread.

    An error that concerns one tensor fails this tensor only; any other error is permanent and reaches all ranks.
    """

    def __init__(
        self, connection: Connection, config: Config, world: World, meet: Meet, dump: Callable[[], None] | None = None
    ) -> None:
        """Connect to all ranks. Nothing else may use the C++ engine of the connection. Raises StartTimeout or
        CommError.

        dump: called when a tensor stalls, to write the stacks of all ranks to files; if None, each rank prints its own
        stacks.
        """
        self.rank = world.rank
        self.size = world.world_size
        self.connection = connection
        self._on_stall = config.on_stall
        self._dump = dump
        try:
            descriptors, start = _connect(world, meet, config)
        except BaseException as error:
            connection.abandon(f"named tensors did not start: {error}")
            raise
        self._negotiation = _core.Negotiation(
            connection.engine,
            connection.engine_of("broadcast"),
            world.rank,
            world.world_size,
            descriptors,
            config.cycle_duration_ms / 1e3,
            config.all_reduce_buffer_size,
            config.group_buffer_size,
            config.stall_warning,
            silence=0.0 if start is None else sockets.silence_of(config),
        )
        if start is not None:
            start(self._negotiation)
        self._kept = KeepAlive(self._has_failed)
        _open.add(self)
        # A daemon thread, so that a process that never calls close() can still exit.
        self._watch = threading.Thread(target=self._listen, name="dadt-stalls", daemon=True)
        self._watch.start()

    @property
    def mail(self) -> PointToPoint:
        return self.connection.mail

    def submit(self, call: Operation, name: str, group: str = "", group_size: int = 0) -> Pending:
        """Start the operation once all ranks have submitted this name; does not block.

        group: name of a set of group_size tensors that run together or fail together. Raises ValueError if the name is
        already pending on this rank.
        """
        if call.kind == "allreduce":
            assert call.layout is not None
            ticket = self._negotiation.allreduce(
                name, call.signature, call.layout, call.inputs, call.outputs, call.reduction, group, group_size
            )
        elif call.kind == "broadcast":
            assert call.layout is not None
            ticket = self._negotiation.broadcast(
                name, call.signature, call.layout, call.inputs, call.root, group, group_size
            )
        else:
            ticket = self._negotiation.exchange(name, call.signature, call.sends, call.receives, group, group_size)
        self._kept.add(ticket, call)
        return Pending(ticket, call)

    def join(self) -> _core.Ticket:
        """Announce that this rank submits no more tensors, so that allreduces of the other ranks run without its values
        until all ranks have joined. The returned ticket is done when all ranks have joined, and names the rank that
        joined last.
        """
        return self._negotiation.join()

    def set_step(self, step: int) -> None:
        """Record which step this rank is in, for reports of stalls."""
        self._negotiation.set_step(step)

    def abort(self, reason: str, lost: bool = False) -> None:
        """Fail all pending and future operations on all ranks; `reason` becomes the text of the errors. lost: whether a
        rank was lost. May be called from any thread."""
        self._negotiation.abort(reason, lost)
        if lost:
            self.connection.abort(reason, lost)

    def close(self, timeout: float) -> None:
        """Wait for pending operations, then close the connections. Raises CommTimeout if that takes longer than
        `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with ExitStack() as stack:
            stack.callback(self._kept.close)
            stack.callback(self.connection.close)
            stack.callback(lambda: self.connection.engine.close(max(0.0, deadline - time.monotonic())))
            stack.callback(_open.discard, self)
            self._negotiation.close(timeout)
        self._watch.join()

    def _has_failed(self) -> bool:
        return self._negotiation.error is not None or self.connection.failed

    def _listen(self) -> None:
        """Run by a thread: print which tensors rank 0 reports as stalled, and write this rank's stacks when rank 0
        orders it."""
        while (notices := self._negotiation.notices(3600.0)) is not None:
            self._hear(notices)

    def _hear(self, notices: Sequence[_core.Notice]) -> None:
        if stalls := [notice.stall for notice in notices if notice.stall is not None]:
            self._tell(stalls)
        if any(notice.order == _DUMP for notice in notices):
            _dump(self.rank)

    def _tell(self, stalls: Sequence[_core.Stall]) -> None:
        """Report tensors that have stalled at the same time, and abort or write stacks as `--on-stall` says. Other
        ranks get their orders before this rank prints, since printing fails if the reader of the output has ended."""
        texts = [describe(stall) for stall in stalls[:_MOST_TOLD]]
        if self._on_stall == "abort":
            self._negotiation.abort(texts[0])
        elif self._on_stall == "dump" and self._dump is None:
            self._negotiation.order(_DUMP)
        for text in texts:
            _say(text)
        if (more := len(stalls) - len(texts)) > 0:
            _say("1 more tensor waits as well" if more == 1 else f"{more} more tensors wait as well")
        if self._on_stall == "dump":
            (self._dump or partial(_dump, self.rank))()


def describe(stall: _core.Stall) -> str:
    """Return the text that names the stalled tensor, the ranks that have submitted it and the missing ranks, with their
    last steps."""
    have, lack = (
        ", ".join(f"rank {r} (step {stall.steps[r]})" for r in ranks) for ranks in (stall.submitted, stall.missing)
    )
    text = f'"{stall.name}" has waited {stall.seconds:.0f} s: submitted by {have}'
    if stall.group:
        return f'{text}; its group "{stall.group}" has {stall.group_has} of {stall.group_size} tensors'
    return f"{text}; not by {lack}"


def _dump(rank: int) -> None:
    _say(f"where rank {rank} is:")
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)


def _say(text: str) -> None:
    sys.stderr.write(f"dadt: {text}\n")
    sys.stderr.flush()


# Connecting the ranks -------------------------------------------------------------------------------------------------


def _connect(world: World, meet: Meet, config: Config) -> tuple[list[int], Start | None]:
    """Connect all ranks to rank 0. Returns socket descriptors (on rank 0 one per rank, -1 for itself; elsewhere only
    the one to rank 0), and a function that begins to replace these connections when they break; None if all ranks share
    a host, where no connection breaks."""
    if world.world_size == 1:
        return [], None
    if world.local_size == world.world_size:
        return _connect_here(world, meet, config.start_timeout), None
    connecting = partial(
        sockets.connect, (_USE,), "named tensors", meet, world, range(world.world_size), config, star=True
    )
    connected = attend(meet, "connecting named tensors", connecting, sockets.Connected.close)
    found = [[each.detach() for each in those] for those in connected.sockets[_USE]]
    descriptors = [those[0] if those else -1 for those in found]
    assert connected.mender is not None
    rate = pace_of(config.link) / (world.world_size - 1)
    start = partial(connected.mender.start, counts=list(map(len, found)), silence=sockets.silence_of(config), rate=rate)
    return descriptors if world.rank == 0 else descriptors[:1], start


def _connect_here(world: World, meet: Meet, timeout: float) -> list[int]:
    """Connect ranks that share a host, over an abstract Unix address, so that no file remains and other hosts cannot
    connect."""
    deadline = time.monotonic() + timeout
    if world.rank != 0:
        offer = meet.exchange("named tensors", b"")[0]
        return [_call(offer, world.rank, deadline)]
    token = secrets.token_bytes(_TOKEN_BYTES)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0dadt-{secrets.token_hex(16)}")
        listener.listen(world.world_size)
        meet.exchange("named tensors", token + bytes(listener.getsockname()))
        return _accept(listener, token, world.world_size, deadline, timeout)


def _call(offer: bytes, rank: int, deadline: float) -> int:
    token, name = offer[:_TOKEN_BYTES], offer[_TOKEN_BYTES:]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(max(0.1, deadline - time.monotonic()))
    try:
        connection.connect(name)
        connection.sendall(token + _RANK.pack(rank))
    except OSError as error:
        connection.close()
        raise CommError(f"rank {rank} does not reach rank 0 on this host: {error}") from error
    return connection.detach()


def _accept(listener: socket.socket, token: bytes, world_size: int, deadline: float, timeout: float) -> list[int]:
    """Accept one connection from each rank. Connections that do not send the token are closed. Raises StartTimeout
    naming the missing ranks."""
    ranks: list[socket.socket | None] = [None] * world_size
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector, ExitStack() as at_end:

        def drop(connection: socket.socket) -> None:
            selector.unregister(connection)
            connection.close()

        # The limit on unproved connections grows by the number of ranks, since all ranks may connect at the same
        # moment.
        entrance = Entrance(listener, drop, MOST_UNPROVED + world_size)
        at_end.callback(entrance.close)
        selector.register(listener, selectors.EVENT_READ)
        while absent := [r for r in range(1, world_size) if ranks[r] is None]:
            if time.monotonic() >= deadline:
                raise StartTimeout(f"{ranked(absent)} did not come to the start of named tensors within {timeout:g} s")
            for key, _ in selector.select(deadline - time.monotonic()):
                if key.fileobj is listener:
                    if (connection := entrance.accept()) is not None:
                        connection.settimeout(0)
                        selector.register(connection, selectors.EVENT_READ, bytearray())
                    continue
                caller = key.fileobj
                assert isinstance(caller, socket.socket)
                if caller.fileno() < 0 or (rank := _greeted(caller, key.data, token, ranks)) is None:
                    continue  # the connection was closed in this loop already, or the greeting is incomplete
                entrance.settle(caller)
                if rank:
                    selector.unregister(caller)
                    ranks[rank] = caller
                    at_end.callback(caller.close)
                else:
                    drop(caller)
        return [-1 if connection is None else connection.detach() for connection in ranks]


def _greeted(
    connection: socket.socket, said: bytearray, token: bytes, ranks: Sequence[socket.socket | None]
) -> int | None:
    """Read a caller's greeting (token and rank). Returns the rank, 0 if the caller is no rank of this job, None if the
    greeting is incomplete."""
    try:
        more = connection.recv(_GREETING_BYTES - len(said))
    except BlockingIOError:
        return None
    except OSError:
        return 0
    said += more
    if more and len(said) < _GREETING_BYTES:
        return None
    if not hmac.compare_digest(bytes(said[:_TOKEN_BYTES]), token):
        return 0
    (rank,) = _RANK.unpack(said[_TOKEN_BYTES:])
    return rank if 0 < rank < len(ranks) and ranks[rank] is None else 0


_open: weakref.WeakSet[Named] = weakref.WeakSet()


def _forsake_all() -> None:
    """Close the inherited connections in a forked child, because peers would not notice the parent's end while the
    child has them open."""
    for named in list(_open):
        named._negotiation.forsake()


os.register_at_fork(after_in_child=_forsake_all)
