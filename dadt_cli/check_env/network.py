"""Checks network cards, and the address at which other hosts would reach this one."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from dadt.control import network
from dadt_cli.check_env.check import Check, CheckOptions, fail, good, warn

PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
LEAST_PORTS = 1000
BY_NAME = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def checks(asked: CheckOptions) -> Iterator[Check]:
    yield _name(asked)
    yield from _addresses(asked)
    for variable in BY_NAME:
        if chosen := os.environ.get(variable):
            yield _chosen(variable, chosen)
    first, last = map(int, PORTS.read_text().split())
    if last - first < LEAST_PORTS:
        yield warn("free ports", f"{first} to {last}", "sysctl -w net.ipv4.ip_local_port_range='32768 60999'")
    else:
        yield good("free ports", f"{first} to {last}")


def _name(asked: CheckOptions) -> Check:
    name = socket.gethostname()
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        hint = f"add a line with {name} to /etc/hosts: Gloo and torchrun look for their own host's address by name"
        return warn("host name", f"{name} has no address ({error.strerror})", hint)
    value = f"{name} ({', '.join(found)})"
    if asked.hosts > 1 and all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found):
        hint = f"let /etc/hosts give {name} this host's own address: Gloo and torchrun tell others the one of its name"
        return warn("host name", value, hint)
    return good("host name", value)


def _addresses(asked: CheckOptions) -> Iterator[Check]:
    found = network.addresses()
    listed = ", ".join(f"{entry['interface']} {entry['address']}" for entry in found)
    if not found:
        if asked.hosts > 1:
            yield fail("addresses", "none that other hosts could reach", "connect it to the others' network")
        else:
            yield good("addresses", "none that other hosts could reach: jobs on this host alone need none")
        return
    yield good("addresses", listed)
    allowed = network.allowed(found, asked.network_interface)
    if not allowed:
        yield fail("first choice", f"--network-interface {asked.network_interface} matches none", f"one of: {listed}")
        return
    first = network.fastest(allowed)
    yield good("first choice", f"{first['interface']} {first['address']}, {_speed(first)}")
    yield good("MTU", psutil.net_if_stats()[first["interface"]].mtu, alike="warn")


def _chosen(variable: str, chosen: str) -> Check:
    """Check that the variable names existing network interfaces. Gloo and NCCL take a list; NCCL also takes prefixes,
    =exact names, ^excluded names, and name:port for RDMA cards."""
    names = list(psutil.net_if_addrs())
    if chosen.startswith("^"):
        return good(variable, chosen)
    exact = chosen.startswith("=") or variable.startswith("GLOO")
    for part in chosen.lstrip("=").split(","):
        wanted = part.partition(":")[0].strip()
        if not any(name == wanted if exact else name.startswith(wanted) for name in names):
            hint = (
                f"unset {variable} (dadt run finds the interface by connecting), or set it to one of {', '.join(names)}"
            )
            return warn(variable, f"{chosen}, and there is no {wanted}", hint)
    return good(variable, chosen)


def _speed(entry: Mapping[str, Any]) -> str:
    speed = entry["speed"]
    if not speed:
        return "speed unknown"
    return f"{speed / 1000:g} Gbit/s" if speed >= 1000 else f"{speed} Mbit/s"
