"""Named tensors: verbs in any order from any thread, brought into one order on all ranks and fused."""

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
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from dadt import _core
from dadt.comm.collectives.operation import Operation
from dadt.comm.collectives.ordered import Pending
from dadt.comm.keepalive import KeepAlive
from dadt.control.accept import MOST_UNPROVED, Entrance
from dadt.errors import CommError, StartTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dadt.comm.executors.base import Connection, PointToPoint
    from dadt.comm.executors.meet import Meet
    from dadt.config import Config
    from dadt.world import World

_TOKEN_BYTES = 32
_RANK = struct.Struct("<I")
_GREETING_BYTES = _TOKEN_BYTES + _RANK.size
_DUMP = "dump"
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 6),
    (socket.TCP_USER_TIMEOUT, 40_000),  # the others do not count while something is on its way
)
"""Options by which TCP notices within 40 s that a host is gone."""


class Named:
    """One rank's named tensors. Any thread.

    An error of one tensor is that tensor's; any other sticks, and reaches all ranks.
    """

    def __init__(
        self,
        connection: Connection,
        config: Config,
        world: World,
        meet: Meet,
        dump: Callable[[], None] | None = None,
    ) -> None:
        """Connect to all ranks. The connection's engine gets no other user. Raises StartTimeout, CommError.

        dump: has all ranks' stacks put into files; else each rank prints its own where a tensor stalls.
        """
        self.rank = world.rank
        self.size = world.world_size
        self._connection = connection
        self._on_stall = config.on_stall
        self._dump = dump
        try:
            sockets = _connect(world, meet, config.start_timeout)
        except BaseException as error:
            connection.abandon(f"named tensors did not start: {error}")
            raise
        self._negotiation = _core.Negotiation(
            connection.engine,
            connection.engine_of("broadcast"),
            world.rank,
            world.world_size,
            sockets,
            config.cycle_duration_ms / 1e3,
            config.all_reduce_buffer_size,
            config.group_buffer_size,
            config.stall_warning,
        )
        self._kept = KeepAlive(self._has_failed)
        _open.add(self)
        # A daemon: it must not keep a process from ending that does not close us.
        self._watch = threading.Thread(target=self._listen, name="dadt-stalls", daemon=True)
        self._watch.start()

    @property
    def connection(self) -> Connection:
        return self._connection

    @property
    def mail(self) -> PointToPoint:
        return self._connection.mail

    def submit(self, call: Operation, name: str, group: str = "", group_size: int = 0) -> Pending:
        """Start the verb on all ranks that submit this name; does not block.

        group: its group_size members are run together, or fail together. ValueError if the name is pending here.
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
        """This rank submits no more: it adds nothing to the others' allreduces until all have joined. Its ticket is
        done then, and tells who was the last."""
        return self._negotiation.join()

    def set_step(self, step: int) -> None:
        """Record which step this rank is in, for reports of stalls."""
        self._negotiation.set_step(step)

    def abort(self, reason: str, lost: bool = False) -> None:
        """Fail everything pending and to come, on all ranks. lost: since one of them is. Any thread."""
        self._negotiation.abort(reason, lost)
        if lost:
            self._connection.abort(reason, lost)

    def close(self, timeout: float) -> None:
        """Wait for what is pending, then end. Raises CommTimeout if that took longer."""
        deadline = time.monotonic() + timeout
        with ExitStack() as stack:
            stack.callback(self._kept.close)
            stack.callback(self._connection.close)
            stack.callback(lambda: self._connection.engine.close(max(0.0, deadline - time.monotonic())))
            stack.callback(_open.discard, self)
            self._negotiation.close(timeout)
        self._watch.join()

    def _has_failed(self) -> bool:
        return self._negotiation.error is not None or self._connection.failed

    def _listen(self) -> None:
        """The watching thread: prints which tensors rank 0 finds stalled, and follows rank 0's orders."""
        while (notices := self._negotiation.notices(3600.0)) is not None:
            for notice in notices:
                if notice.stall is not None:
                    self._tell(notice.stall)
                elif notice.order == _DUMP:
                    _dump(self.rank)

    def _tell(self, stall: _core.Stall) -> None:
        """Act on a stalled tensor as `--on-stall` says, then print it: whoever reads the output may be gone."""
        text = describe(stall)
        if self._on_stall == "abort":
            self._negotiation.abort(text)
        elif self._on_stall == "dump" and self._dump is None:
            self._negotiation.order(_DUMP)
        _say(text)
        if self._on_stall == "dump":
            (self._dump or partial(_dump, self.rank))()


def describe(stall: _core.Stall) -> str:
    """The text on who has submitted the tensor and who has not, with their last steps."""
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


# Connecting -----------------------------------------------------------------------------------------------------------


def _connect(world: World, meet: Meet, timeout: float) -> list[int]:
    """Descriptors of connections: on rank 0 to each rank (its own: -1), elsewhere to rank 0."""
    if world.world_size == 1:
        return []
    deadline = time.monotonic() + timeout
    if world.rank != 0:
        offer = meet.exchange("named tensors", b"")[0]
        return [_call(offer, world.rank, deadline)]
    token = secrets.token_bytes(_TOKEN_BYTES)
    with _listener(world) as listener:
        meet.exchange("named tensors", token + _name_of(listener))
        return _accept(listener, token, world.world_size, deadline, timeout)


def _listener(world: World) -> socket.socket:
    """Within a host at an abstract address: nothing is left behind, and no other host can come."""
    if world.local_size == world.world_size:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0dadt-{secrets.token_hex(16)}")
        listener.listen(world.world_size)
        return listener
    family = socket.AF_INET6 if ":" in world.address else socket.AF_INET
    return socket.create_server((world.address, 0), family=family, backlog=world.world_size)


def _name_of(listener: socket.socket) -> bytes:
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return bytes(name)
    return f"{name[0]} {name[1]}".encode()


def _call(offer: bytes, rank: int, deadline: float) -> int:
    token, name = offer[:_TOKEN_BYTES], offer[_TOKEN_BYTES:]
    left = max(0.1, deadline - time.monotonic())
    try:
        if name.startswith(b"\0"):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(left)
            connection.connect(name)
        else:
            host, port = name.decode().split()
            connection = socket.create_connection((host, int(port)), left)
        connection.sendall(token + _RANK.pack(rank))
    except OSError as error:
        where = "on this host" if name.startswith(b"\0") else f"at {name.decode().replace(' ', ':')}"
        raise CommError(f"rank {rank} does not reach rank 0 {where}: {error}") from error
    return _detach(connection)


def _accept(listener: socket.socket, token: bytes, world_size: int, deadline: float, timeout: float) -> list[int]:
    """One connection of each rank. Whoever does not know the token is dropped."""
    ranks: list[socket.socket | None] = [None] * world_size
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector, ExitStack() as at_end:

        def drop(connection: socket.socket) -> None:
            selector.unregister(connection)
            connection.close()

        # As many more than strangers may have as there are ranks: those all come at once.
        entrance = Entrance(listener, drop, MOST_UNPROVED + world_size)
        at_end.callback(entrance.close)
        selector.register(listener, selectors.EVENT_READ)
        while absent := [str(r) for r in range(1, world_size) if ranks[r] is None]:
            if time.monotonic() >= deadline:
                who = f"rank{'s' if len(absent) > 1 else ''} {', '.join(absent)}"
                raise StartTimeout(f"{who} did not come to the start of named tensors within {timeout:g} s")
            for key, _ in selector.select(deadline - time.monotonic()):
                if key.fileobj is listener:
                    if (connection := entrance.accept()) is not None:
                        connection.settimeout(0)
                        selector.register(connection, selectors.EVENT_READ, bytearray())
                    continue
                caller = key.fileobj
                assert isinstance(caller, socket.socket)
                if caller.fileno() < 0 or (rank := _greeted(caller, key.data, token, ranks)) is None:
                    continue  # dropped in this turn, or not all is said yet
                entrance.settle(caller)
                if rank:
                    selector.unregister(caller)
                    ranks[rank] = caller
                    at_end.callback(caller.close)
                else:
                    drop(caller)
        return [-1 if connection is None else _detach(connection) for connection in ranks]


def _greeted(
    connection: socket.socket, said: bytearray, token: bytes, ranks: Sequence[socket.socket | None]
) -> int | None:
    """The rank that calls; 0: none of ours; None: not all is said yet."""
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


def _detach(connection: socket.socket) -> int:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection.detach()


_open: weakref.WeakSet[Named] = weakref.WeakSet()


def _forsake_all() -> None:
    """Drop the connections in a forked child, which would else hide its parent's end from the peers."""
    for named in list(_open):
        named._negotiation.forsake()


os.register_at_fork(after_in_child=_forsake_all)
