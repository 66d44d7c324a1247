"""Finds the address at which other hosts reach a host, by trying to connect instead of guessing from the names of
network interfaces."""

from __future__ import annotations

import errno
import ipaddress
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from dadt.control.accept import MOST_AT_ONCE, Entrance
from dadt.errors import ConfigError, LaunchError

VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "lxc", "podman")
"""Name prefixes of network interfaces that lead only to containers of the same host."""
PROBE_SECONDS = 3.0
SETTLE_SECONDS = 0.2
"""Seconds to wait for answers of further addresses, once one address of every host has answered."""
CROWD = 16
"""Number of hosts above which a listen queue may overflow. The kernel then repeats a connection request after 1 s, so
CROWD_SETTLE_SECONDS is used instead of SETTLE_SECONDS."""
CROWD_SETTLE_SECONDS = 1.3
BACKLOG = 4096
"""Length of the listen queue, enough for a connection from every other host to every address of this host. The kernel
may reduce it."""
TOKEN_BYTES = 16
SAME_MACHINE = "127.0.0.1"


def addresses() -> list[dict[str, Any]]:
    """Return this host's addresses that other hosts might reach, as {interface, address, speed (Mbit/s, 0:
    unknown)}."""
    states = psutil.net_if_stats()
    running: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for name, entries in psutil.net_if_addrs().items():
        state = states.get(name)
        # An interface may already be up a second before the kernel reports that it is running.
        if state is None or name.startswith(VIRTUAL):
            continue
        if not (state.isup or "up" in getattr(state, "flags", "").split(",")):
            continue
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = ipaddress.ip_address(entry.address.partition("%")[0])
            if not (address.is_loopback or address.is_link_local):
                told = {"interface": name, "address": str(address), "speed": state.speed}
                (running if state.isup else others).append(told)
    return running or others


def interface_of(address: str) -> str:
    """Return the network interface of this host that has the address; empty if none has."""
    return next((entry["interface"] for entry in addresses() if entry["address"] == address), "")


def allowed(entries: Sequence[Mapping[str, Any]], wanted: str) -> list[Mapping[str, Any]]:
    """Return the entries that --network-interface selects by comma-separated interfaces or networks; all entries if
    `wanted` is empty."""
    if not wanted:
        return list(entries)
    parts = [part.strip() for part in wanted.split(",")]
    return [entry for entry in entries if any(_matches(entry, part) for part in parts)]


def fastest(entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the address entry with the highest speed, which is the one to use if other hosts can reach every entry."""
    return min(entries, key=lambda entry: _cost(entry, []))


def check(wanted: str) -> None:
    """Raise ConfigError if the value of --network-interface contains an invalid network."""
    for part in filter(None, wanted.split(",")):
        if "/" in part:
            try:
                ipaddress.ip_network(part.strip(), strict=False)
            except ValueError as error:
                raise ConfigError(f"--network-interface {wanted}: {error}; give eth0 or 10.0.0.0/8") from None


class ProbeListener:
    """Answers every connection with this agent's token. If several hosts have the same address, as in container
    networks, a client may reach its own host there; a wrong token shows this."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        # One socket serves IPv4 and IPv6 if the kernel supports IPv6.
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        server = socket.create_server(("", 0), family=family, backlog=BACKLOG, dualstack_ipv6=both)
        server.setblocking(False)
        self._entrance = Entrance(server, lambda connection: connection.close())
        self.port = int(server.getsockname()[1])

    def fileno(self) -> int:
        return self._entrance.server.fileno()

    def answer(self) -> None:
        for _ in range(MOST_AT_ONCE):
            connection = self._entrance.accept()
            if connection is None:
                return  # connections that could not be accepted yet will wake the selector again
            self._entrance.settle(connection)
            with connection, suppress(ConnectionError):  # the client may have hung up already
                connection.send(self._token)  # the token's 16 bytes always fit into the buffer of a new socket

    def close(self) -> None:
        self._entrance.close()


@dataclass(slots=True)
class _Attempt:
    index: int
    address: str
    token: bytes
    begun: float
    heard: bytes = b""


@dataclass(slots=True)
class Probe:
    """Connects to all addresses of all other hosts at once. The agent calls `advance` until `finished`."""

    targets: Sequence[Mapping[str, Any]]
    """One entry {index, port, token, addresses} for each other host."""
    reached: dict[int, dict[str, float]] = field(default_factory=dict)
    """For each host index, the addresses that answered, each with the seconds until the answer came."""
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _deadline: float = field(default_factory=lambda: time.monotonic() + PROBE_SECONDS)
    _settled: float = float("inf")

    def start(self) -> None:
        for target in self.targets:
            self.reached[target["index"]] = {}
            for address in target["addresses"]:
                self._try(target, address)

    @property
    def finished(self) -> bool:
        now = time.monotonic()
        return not self._selector.get_map() or now >= min(self._deadline, self._settled)

    def advance(self) -> None:
        for key, _ in self._selector.select(0):
            self._read(key.fileobj, key.data)
        if self._settled == float("inf") and all(self.reached.values()):
            crowd = len(self.targets) > CROWD
            self._settled = time.monotonic() + (CROWD_SETTLE_SECONDS if crowd else SETTLE_SECONDS)

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            self._drop(key.fileobj)
        self._selector.close()

    def _try(self, target: Mapping[str, Any], address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            connection = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            return  # this host does not support the address family
        connection.setblocking(False)
        error = connection.connect_ex((address, target["port"]))
        if error not in (0, errno.EINPROGRESS):
            connection.close()
            return
        attempt = _Attempt(target["index"], address, bytes.fromhex(target["token"]), time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ, attempt)

    def _read(self, connection: Any, attempt: _Attempt) -> None:
        try:
            data = connection.recv(TOKEN_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # the connection was refused, or the host is unreachable
        attempt.heard += data
        if attempt.heard == attempt.token:
            self.reached[attempt.index][attempt.address] = time.monotonic() - attempt.begun
        if not data or len(attempt.heard) >= TOKEN_BYTES:
            self._drop(connection)

    def _drop(self, connection: Any) -> None:
        self._selector.unregister(connection)
        connection.close()


def agree(
    names: Sequence[str], reports: Sequence[Mapping[str, Any]], reached: Sequence[Mapping[str, Mapping[str, float]]]
) -> list[tuple[str, str]]:
    """Choose the (address, interface) of each host: of those that all other hosts reach, the fastest link, and among
    equal ones the quickest answer.

    reports: each agent's report about its host, with allowed addresses only. reached: the results of each agent's
    Probe. Lists are indexed by host. Raises LaunchError, which names all pairs of hosts without a connection.
    """
    ways = [
        [reached[other].get(str(index), {}) for other in range(len(reports)) if other != index]
        for index in range(len(reports))
    ]
    good = [
        [entry for entry in report["addresses"] if all(entry["address"] in way for way in ways[index])]
        for index, report in enumerate(reports)
    ]
    if not all(good):
        raise LaunchError(_cut(names, reports, reached, [index for index, entries in enumerate(good) if not entries]))
    for newer in (False, True):
        # If possible, all hosts use the same address family (IPv4 or IPv6), since libraries have problems with a
        # mixture.
        same = [[entry for entry in entries if (":" in entry["address"]) is newer] for entries in good]
        if all(same):
            good = same
            break
    chosen = [min(entries, key=lambda entry, i=index: _cost(entry, ways[i])) for index, entries in enumerate(good)]  # type: ignore[misc]
    return [(entry["address"], entry["interface"]) for entry in chosen]


def choose(entries: Sequence[Mapping[str, Any]], ways: Sequence[Mapping[str, float]]) -> tuple[str, str]:
    """Choose the (address, interface) of one more host: of those that all other hosts reach, the fastest link, and
    among equal ones the quickest answer. entries: the new host's allowed addresses. ways: for each other host, the new
    host's addresses that it reaches, with the seconds until the answer. Raises LaunchError if there is none."""
    good = [entry for entry in entries if all(entry["address"] in way for way in ways)]
    if not good:
        tried = ", ".join(entry["address"] for entry in entries)
        raise LaunchError(f"not all other hosts reach it at {tried}" if tried else "it has no address for other hosts")
    best = min(good, key=lambda entry: _cost(entry, ways))
    return best["address"], best["interface"]


def _cost(entry: Mapping[str, Any], ways: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    return -entry["speed"], round(max((way[entry["address"]] for way in ways), default=0.0), 3)


def _cut(
    names: Sequence[str],
    reports: Sequence[Mapping[str, Any]],
    reached: Sequence[Mapping[str, Mapping[str, float]]],
    hidden: Sequence[int],
) -> str:
    parts = []
    for index in hidden:
        tried = ", ".join(entry["address"] for entry in reports[index]["addresses"])
        blind = [name for other, name in enumerate(names) if other != index and not reached[other].get(str(index))]
        by = ", ".join(blind) or "all others at one address"
        parts.append(f"{names[index]} ({tried}) is not reached by {by}" if tried else f"{names[index]} has no address")
    remedy = "open the firewall between them, or choose another network with --network-interface"
    return f"no way between hosts: {'; '.join(parts)} -> {remedy}"


def _matches(entry: Mapping[str, Any], part: str) -> bool:
    if "/" not in part:
        return part in (entry["interface"], entry["address"])
    network = ipaddress.ip_network(part, strict=False)
    return ipaddress.ip_address(entry["address"]) in network
