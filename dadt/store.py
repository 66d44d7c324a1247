"""A key-value store that all ranks reach, where no agent started them: found without the user's help where possible."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from dadt import world as environment
from dadt.errors import ConfigError, StartTimeout
from dadt.launch import library, network
from dadt.world import LAUNCHERS, World

RETRY_SECONDS = 0.02
CONNECT_SECONDS = 3.0
NOTE_BYTES = 4096
LOOPBACK = "127.0.0.1"


def connect(world: World, timeout: float) -> tuple[Store, str, str]:
    """The store, this host's own address on the way to it, and the store's.

    Raises StartTimeout where ranks do not come within `timeout` seconds, ConfigError where none knows the others.
    """
    master = environment.master()
    if world.local_size == world.world_size and world.launcher != "torchrun":
        return _on_this_host(world, timeout), LOOPBACK, LOOPBACK
    if master is not None:
        served, attempt = environment.torchrun_attempt()
        store = _at(*master, world, timeout, serve=world.rank == 0 and not served)
        return PrefixStore(f"dadt {attempt}", store), *ends(*master)
    store, host, port = _by_mpi(world, timeout)
    return store, *ends(host, port)


def ends(host: str, port: int) -> tuple[str, str]:
    """Both addresses of a way to there."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(target)  # sends nothing
        return way.getsockname()[0], way.getpeername()[0]


def _at(host: str, port: int, world: World, timeout: float, *, serve: bool) -> Store:
    """At a known address, which the script's own process group may use as well."""
    try:
        return TCPStore(host, port, None, serve, timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=serve)
    except RuntimeError as error:  # whatever torch calls it, no store came about
        if serve:
            raise ConfigError(f"rank 0 cannot serve at MASTER_PORT {port}: {error}; give another") from error
        raise StartTimeout(f"rank {world.rank} reaches no rank 0 at {host}:{port} ({error})") from error


def _served_here(address: str, timeout: float) -> TCPStore:
    """By this process, at a port that the kernel chooses. address: where to listen; empty for everywhere."""
    with socket.create_server((address, 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        return TCPStore(
            address or LOOPBACK,
            port,
            None,
            True,
            timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


# All ranks on one host: they share an ancestor, after whom rank 0 names a socket that no file system sees. ------------


def _on_this_host(world: World, timeout: float) -> Store:
    deadline = time.monotonic() + timeout
    name = f"\0dadt-{os.getuid()}-{_launcher_of(world)}"
    if world.rank == 0:
        store = _served_here(LOOPBACK, timeout)
        _tell(name, store.port, world, deadline, timeout)
        return store
    return TCPStore(LOOPBACK, _ask(name, world, deadline, timeout), None, False, timedelta(seconds=timeout))


def _tell(name: str, port: int, world: World, deadline: float, timeout: float) -> None:
    """The port, to every other rank."""
    missing = set(range(1, world.world_size))
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.bind(name)
        except OSError as error:
            raise ConfigError(
                f"another process has begun to meet the ranks of this {world.launcher}: only one program may train"
            ) from error
        server.listen(world.world_size)
        while missing:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                line, _ = server.accept()
                with line:
                    line.settimeout(CONNECT_SECONDS)
                    if _is_ours(line):
                        missing.discard(int.from_bytes(line.recv(4), "big"))
                        line.sendall(port.to_bytes(4, "big"))
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise StartTimeout(
                        f"{_ranks(missing)} did not import dadt within {timeout:g} s: every rank must, with torch"
                    ) from None


def _ask(name: str, world: World, deadline: float, timeout: float) -> int:
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(CONNECT_SECONDS)
            try:
                line.connect(name)
                if _is_ours(line):
                    line.sendall(world.rank.to_bytes(4, "big"))
                    if answer := line.recv(4):
                        return int.from_bytes(answer, "big")
            except OSError:
                pass  # rank 0 is not there yet, and nobody tells when it is
        time.sleep(RETRY_SECONDS)
    raise StartTimeout(f"rank 0 did not import dadt within {timeout:g} s: every rank must, with torch")


def _is_ours(line: socket.socket) -> bool:
    """Whether the other side is a process of this user."""
    credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def _launcher_of(world: World) -> str:
    """Pid and start time of the nearest ancestor that has no rank: mpirun, or its daemon on this host."""
    variable = LAUNCHERS[world.launcher][0].encode() + b"="
    pid = os.getppid()
    while pid > 1 and any(entry.startswith(variable) for entry in _environment(pid)):
        pid = int(_stat(pid)[1])
    return f"{pid}-{_stat(pid)[19]}"


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except PermissionError:
        return []  # another user's: a daemon of the scheduler


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat after the name, which may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


# Several hosts, and MPI alone knows how they reach each other. --------------------------------------------------------


def _by_mpi(world: World, timeout: float) -> tuple[Store, str, int]:
    try:
        library.choose()
        mpi = import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:  # not installed, or its MPI library is not found
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
    store = _served_here("", timeout) if world.rank == 0 else None
    addresses = [entry["address"] for entry in network.addresses()]
    note = _broadcast(mpi, {"addresses": addresses, "port": store.port} if store else {}, timeout)
    port = note["port"]
    if store is not None:
        return store, LOOPBACK, port
    for address in _reached(note["addresses"], port):
        return TCPStore(address, port, None, False, timedelta(seconds=timeout)), address, port
    raise StartTimeout(
        f"rank {world.rank} reaches rank 0 at none of its addresses ({', '.join(note['addresses'])}, port "
        f"{port}) -> open the firewall between the hosts, or export MASTER_ADDR and MASTER_PORT"
    )


def _broadcast(mpi: Any, note: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Rank 0's note, to all."""
    deadline = time.monotonic() + timeout
    buffer = bytearray(json.dumps(note).encode().ljust(NOTE_BYTES))
    request = mpi.COMM_WORLD.Ibcast([buffer, mpi.BYTE], root=0)
    while not request.Test():
        if time.monotonic() >= deadline:
            raise StartTimeout(f"some ranks did not import dadt within {timeout:g} s: every rank must, with torch")
        time.sleep(RETRY_SECONDS)  # MPI has no wait with a deadline
    received: dict[str, Any] = json.loads(buffer)
    return received


def _reached(addresses: list[str], port: int) -> Iterator[str]:
    for address in addresses:
        try:
            with closing(socket.create_connection((address, port), CONNECT_SECONDS)):
                yield address
        except OSError:
            continue  # a network that these hosts do not share


def _ranks(ranks: set[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))
