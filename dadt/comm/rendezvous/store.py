"""Key-value store for ranks that no agent started, and the ways in which ranks find it without the user's help.

Rank 0 serves the values. Before training begins, the other ranks connect to it and both sides prove that they belong to
the job; then rank 0 stops listening.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from dadt import world as environment
from dadt.comm.rendezvous.values import RemoteValues, Server, SharedValues
from dadt.control import mpi_library, schema
from dadt.control.accept import peer_of
from dadt.control.connection import Listener, Reach, Refused, SealedConnection, Unreached, Words, dial
from dadt.control.job_folder import root
from dadt.control.proc import ancestors, stat_fields
from dadt.control.shared_secret import SECRET, shared_key
from dadt.errors import ConfigError, StartTimeout
from dadt.world import LAUNCHERS, World, ranked

RETRY_SECONDS = 0.02
CONNECT_SECONDS = 3.0
NOTE_BYTES = 4096
KEY_BYTES = 32
LOOPBACK = "127.0.0.1"
NOTE = "note"
IS_NOTE = schema.record(
    addresses=schema.listed(schema.text(64), 1024), port=schema.whole(1, 65535), key=schema.text(2 * KEY_BYTES)
)

Tell = Callable[[Words], AbstractContextManager[Words]]
"""Function that is called with rank 0's note (where to connect) and returns a context manager, in whose context the
note reaches all ranks. On the other ranks, entering the context returns rank 0's note."""


@dataclass(frozen=True, slots=True)
class Found:
    """The key-value store that this rank has connected to, with addresses and secret."""

    values: SharedValues
    own: str = LOOPBACK
    """This host's address on the route to rank 0."""
    other: str = LOOPBACK
    """Address of rank 0's host, as seen from this host."""
    secret: bytes = b""
    """Secret that only ranks of this job know; empty if others could have learned it."""
    server: Server | None = None
    """Server process for the values, on rank 0 only. It ends when this object is garbage-collected or closed."""


def connect(world: World, timeout: float, silence: float) -> Found:
    """Connect this rank to the job's key-value store. silence: seconds without data after which the connection to rank
    0 counts as broken.

    Raises StartTimeout if ranks do not join within `timeout` seconds, and ConfigError if there is no way for ranks to
    find each other.
    """
    if world.local_size == world.world_size:
        return _on_this_host(world, timeout)
    key = shared_key(f"{world.launcher} on several hosts")
    if (master := environment.master()) is None:
        tell, proved = _by_mpi(world, timeout), True
    else:
        tell, proved = _by_torch(master, world, timeout), bool(key)
    meet = _hold if world.rank == 0 else _come
    return meet(world, tell, key, proved, timeout, silence)


def ends(host: str, port: int) -> tuple[str, str]:
    """Return the local and the remote IP address of the route to `host`."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(target)  # connecting a UDP socket sends nothing, it only selects the route
        return way.getsockname()[0], way.getpeername()[0]


# All ranks on one host: rank 0 names a socket in the user's folder after an ancestor process that all ranks share. ----


def _on_this_host(world: World, timeout: float) -> Found:
    deadline = time.monotonic() + timeout
    path = root() / f"meet-{_launcher_of(world)}-{environment.torchrun_attempt()[1]}"
    if world.rank == 0:
        server, secret = Server(), secrets.token_bytes(KEY_BYTES)
        _accept(path, server, secret, world, deadline, timeout)
        return Found(server.asked(timeout), secret=secret, server=server)
    line, secret = _line_to(path, world, deadline, timeout)
    return Found(RemoteValues(line, None, timeout), secret=secret)


def _accept(path: Path, server: Server, secret: bytes, world: World, deadline: float, timeout: float) -> None:
    """Accept the connections of all other ranks and send each the secret. Raises StartTimeout naming the missing
    ranks."""
    missing = set(range(1, world.world_size))
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(str(path))
        except OSError as error:
            raise ConfigError(
                f"another process has begun to meet the ranks of this {world.launcher}: only one program may train"
            ) from error
        try:
            listener.listen(world.world_size)
            while missing:
                listener.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    line, _ = listener.accept()
                    line.settimeout(CONNECT_SECONDS)
                    if peer_of(line).uid == os.getuid() and (rank := int.from_bytes(line.recv(4), "big")) in missing:
                        line.sendall(secret)
                        missing.discard(rank)
                        server.admit(line, None)
                    else:
                        line.close()
                except OSError:  # the deadline has passed, or a rank that connected has ended
                    if time.monotonic() >= deadline:
                        raise _late(missing, timeout) from None
        finally:
            path.unlink(missing_ok=True)


def _line_to(path: Path, world: World, deadline: float, timeout: float) -> tuple[socket.socket, bytes]:
    """Connect to rank 0's socket. Returns the connection and the secret received over it. Raises StartTimeout."""
    while time.monotonic() < deadline:
        line = socket.socket(socket.AF_UNIX)
        try:
            line.settimeout(CONNECT_SECONDS)
            line.connect(str(path))
            if peer_of(line).uid == os.getuid():
                line.sendall(world.rank.to_bytes(4, "big"))
                if len(secret := line.recv(KEY_BYTES, socket.MSG_WAITALL)) == KEY_BYTES:
                    return line, secret
        except OSError:
            pass  # rank 0 has not created its socket yet; polling is the only way to notice when it does
        line.close()
        time.sleep(RETRY_SECONDS)
    raise _late({0}, timeout)


def _launcher_of(world: World) -> str:
    """Return "<pid>-<start time>" of the nearest ancestor process that is not a rank: mpirun, or its daemon on this
    host."""
    variable = LAUNCHERS[world.launcher][0].encode() + b"="
    ranks_end = (pid for pid in ancestors() if not any(entry.startswith(variable) for entry in _environment(pid)))
    pid = next(ranks_end, 1)
    fields = stat_fields(Path(f"/proc/{pid}"))
    return f"{pid}-{fields[19] if fields else 0}"


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # the process belongs to another user, as a scheduler's daemon does; /proc may hide it altogether


# Several hosts: rank 0 listens, and sends the others its address, and the key if they have none. ----------------------


def _hold(world: World, tell: Tell, key: bytes, proved: bool, timeout: float, silence: float) -> Found:
    """Serve the store on rank 0 and wait until all other ranks have joined."""
    server = Server()
    # A secret that others could learn on its way to the ranks would prove nothing.
    secret = secrets.token_bytes(KEY_BYTES) if proved else b""
    missing = set(range(1, world.world_size))
    news = threading.Condition()

    def greet(hello: Words) -> Words:
        awaited = hello.get("rank") in list(missing)
        return {"secret": secret.hex()} if awaited else {"refused": f"rank {hello.get('rank')} is not awaited"}

    def take(hello: Words, connection: SealedConnection) -> None:
        server.admit(connection.socket, connection.seal)
        with news:
            missing.discard(hello["rank"])
            news.notify()

    drawn = key or secrets.token_bytes(KEY_BYTES)
    listener = Listener(drawn, silence, greet, take)
    try:
        reach = listener.reach()
        note = {"addresses": list(reach.addresses), "port": reach.port, "key": "" if key else drawn.hex()}
        with tell(note), news:
            if not news.wait_for(lambda: not missing, timeout):
                raise _late(missing, timeout)
    finally:
        listener.close()
    return Found(server.asked(timeout), secret=secret, server=server)


def _come(world: World, tell: Tell, key: bytes, proved: bool, timeout: float, silence: float) -> Found:
    """Connect to rank 0's store; every rank except 0 calls this."""
    deadline = time.monotonic() + timeout
    with tell({}) as note:
        drawn = key or bytes.fromhex(note["key"])
        reach = Reach(addresses=note["addresses"], port=note["port"], key=drawn, silence=silence)
        try:
            connection, answer, _ = dial(lambda: reach, {"rank": world.rank}, deadline)
            secret = bytes.fromhex(answer["secret"]) if proved else b""
        except Refused as error:
            raise StartTimeout(f"rank 0: {error}") from error
        except Unreached as error:
            raise StartTimeout(
                f"rank {world.rank} does not reach rank 0 ({error}) -> open the firewall between the hosts, and give "
                f"all ranks the same {SECRET}, or none"
            ) from error
    asked = RemoteValues(connection.socket, connection.seal, timeout)
    own, other = connection.socket.getsockname()[0], connection.socket.getpeername()[0]
    return Found(asked, own, other, secret)


def _by_torch(master: tuple[str, int], world: World, timeout: float) -> Tell:
    """Return a function that passes rank 0's note through the TCPStore at MASTER_ADDR. This store does not authenticate
    its clients."""
    served, attempt = environment.torchrun_attempt()

    @contextmanager
    def tell(mine: Words) -> Iterator[Words]:
        store = PrefixStore(f"dadt {attempt}", _at(*master, world, timeout, serve=world.rank == 0 and not served))
        if world.rank == 0:
            store.set(NOTE, json.dumps(mine))
            yield mine
        else:
            yield _read(store, world, timeout)

    return tell


def _read(store: Store, world: World, timeout: float) -> Words:
    deadline = time.monotonic() + timeout
    while not store.check([NOTE]):  # poll, since the store's own wait prints a warning whenever it times out
        if time.monotonic() >= deadline:
            raise _late({0}, timeout)
        time.sleep(RETRY_SECONDS)
    return _checked(store.get(NOTE))


def _checked(data: bytes) -> Words:
    """Parse and validate rank 0's note, which might come from a foreign process at rank 0's address. Raises
    StartTimeout if the note is invalid."""
    try:
        note = json.loads(data)
        if IS_NOTE(note):
            bytes.fromhex(note["key"])
            return dict(note)
    except (ValueError, RecursionError):
        pass
    raise StartTimeout("rank 0 told of its address as no dadt of this version does: who else is at MASTER_ADDR?")


def _at(host: str, port: int, world: World, timeout: float, *, serve: bool) -> Store:
    """Return torch's TCPStore at a known address, which the script's own process group may use as well. serve: whether
    this rank is its server."""
    try:
        return TCPStore(host, port, None, serve, timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=serve)
    except RuntimeError as error:  # whatever torch's error says, the store could not be created or reached
        if serve:
            raise ConfigError(f"rank 0 cannot serve at MASTER_PORT {port}: {error}; give another") from error
        raise StartTimeout(f"rank {world.rank} reaches no rank 0 at {host}:{port} ({error})") from error


def _by_mpi(world: World, timeout: float) -> Tell:
    """Return a function that broadcasts rank 0's note by MPI, which can already reach all ranks. Raises ConfigError if
    mpi4py is not usable."""
    try:
        mpi_library.choose()
        mpi = import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:  # mpi4py is not installed, or its MPI library is not found
        raise ConfigError(
            f"{world.world_size} ranks on several hosts were started by {world.launcher}, and none knows where rank 0 "
            f"is ({error}) -> use `dadt run --launcher mpi`, or export MASTER_ADDR and MASTER_PORT on all of them "
            "(mpirun -x MASTER_ADDR=host -x MASTER_PORT=29500), or install mpi4py"
        ) from error
    if mpi.COMM_WORLD.Get_size() != world.world_size:
        raise ConfigError(
            f"mpi4py is built for another MPI than {world.launcher}: it sees {mpi.COMM_WORLD.Get_size()} ranks of "
            f"{world.world_size} -> export MASTER_ADDR and MASTER_PORT instead"
        )

    @contextmanager
    def tell(mine: Words) -> Iterator[Words]:
        yield _broadcast(mpi, mine, timeout)

    return tell


def _broadcast(mpi: Any, note: Words, timeout: float) -> Words:
    """Broadcast rank 0's note by MPI and return it on all ranks. Raises StartTimeout if some ranks do not join in
    time."""
    deadline = time.monotonic() + timeout
    buffer = bytearray(json.dumps(note).encode().ljust(NOTE_BYTES))
    request = mpi.COMM_WORLD.Ibcast([buffer, mpi.BYTE], root=0)
    while not request.Test():
        if time.monotonic() >= deadline:
            raise StartTimeout(f"some ranks did not import dadt within {timeout:g} s: every rank must, with torch")
        time.sleep(RETRY_SECONDS)  # poll, since MPI has no wait with a deadline
    received: Words = json.loads(buffer)
    return received


def _late(missing: set[int], timeout: float) -> StartTimeout:
    return StartTimeout(
        f"{ranked(sorted(missing))} did not import dadt within {timeout:g} s: every rank must, with torch"
    )
