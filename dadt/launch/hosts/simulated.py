"""Simulates hosts on this machine: each has a network of its own behind a link of a given speed to a switch.

The networks are unnamed network namespaces, held open by this process and by the processes in them. When the last of
these processes ends, the kernel removes the namespaces with all interfaces, so nothing is left behind.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from dadt.config import Config
from dadt.config.link import latency_of, rate_of, simulates_hosts
from dadt.errors import ConfigError, LaunchError

PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "taskset": "util-linux"}
PREFIX = "sim"
MOST_HOSTS = 200
"""Largest number of simulated hosts, chosen to be smaller than the number of addresses in their /24 network."""
CLONE_NEWNET = 0x40000000
SECONDS = 30.0
BURST_BYTES = 64 * 1024
"""Minimum number of bytes that may be sent at once at full speed, which is the size of the packets that the kernel's
TCP layer emits."""
BURST_SECONDS = 1e-3
QUEUE = "50ms"
"""Time after which a waiting packet is dropped, as in a real switch."""
PACKETS = 100_000
"""Largest number of packets that a link with latency delays at the same time."""


@dataclass(frozen=True, slots=True)
class SimulatedLink:
    """The full-duplex link between each host and the switch."""

    rate: float = 0.0
    """Bits per second, including the headers of Ethernet and TCP; 0 means unlimited."""
    latency: float = 0.0
    """Seconds by which each packet from a host to another one is delayed."""


def wanted(config: Config) -> bool:
    return simulates_hosts(config.link, config.latency, config.simulate_hosts)


def link_of(config: Config) -> SimulatedLink:
    """Return the simulated link that the configuration describes. Raises ConfigError."""
    return SimulatedLink(rate_of(config.link), latency_of(config.latency))


def hosts_and_slots(config: Config) -> dict[str, int]:
    """Return the number of workers of each simulated host, by the host's name. Raises ConfigError if other flags
    contradict simulated hosts."""
    asked = next(flag for flag, value in _flags(config).items() if value)
    named = config.hosts or config.hostfile or config.host_discovery_script
    if named or config.nnodes or config.launcher not in ("auto", "local"):
        given = "-H" if named else "--nnodes" if config.nnodes else "--launcher"
        raise ConfigError(f"{asked}: simulates hosts on this machine; leave {given} out (MPI does not go with it)")
    hosts = config.simulate_hosts or config.np
    count = config.np or hosts
    if not 0 < hosts <= min(count, MOST_HOSTS):
        remedy = f"give -np N, and --simulate-hosts from 1 to {min(count or MOST_HOSTS, MOST_HOSTS)}"
        raise ConfigError(f"{asked}: {count} workers on {hosts} simulated hosts; {remedy}")
    check_machine(asked)
    each, more = divmod(count, hosts)
    return {f"{PREFIX}{number}": each + (number < more) for number in range(hosts)}


def check_machine(asked: str) -> None:
    """Raise ConfigError if this process cannot create network namespaces, because it is not root or a program is
    missing. asked: the flag that needs simulated hosts, for the message."""
    if os.geteuid() != 0:
        raise ConfigError(f"{asked}: networks can be made by root only -> sudo -E, or a container with --privileged")
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            raise ConfigError(f"{asked}: there is no {program} on this machine -> install {package}")


class Network:
    """The network namespaces of the simulated hosts and of the switch between them."""

    def __init__(self, link: SimulatedLink) -> None:
        """Create the switch. Raises ConfigError if the kernel forbids it or lacks a feature that the link needs."""
        self._link = link
        self._hosts: list[int] = []
        self._switch = _namespace()
        try:
            self._ip(self._switch, "link set lo up", "link add name sw0 type bridge mcast_snooping 0")
            self._ip(self._switch, "link set sw0 up")
        except BaseException:
            self.close()
            raise

    def add(self) -> list[str]:
        """Add a host. Returns words to put before a command line, so that the command runs on the new host."""
        number = len(self._hosts) + 1
        host = _namespace()
        self._hosts.append(host)
        self._ip(
            self._switch,
            f"link add p{number} type veth peer name eth0 netns {_path(host)}",
            f"link set p{number} master sw0 up",
        )
        self._ip(host, "link set lo up", f"addr add 10.77.0.{number}/24 dev eth0", "link set eth0 up")
        self._limit(self._switch, f"p{number}", 0.0)
        self._limit(host, "eth0", self._link.latency)
        return ["nsenter", f"--net={_path(host)}"]

    def close(self) -> None:
        """Close the namespaces. A namespace in which a process still runs exists until the process ends. Idempotent."""
        for descriptor in [self._switch, *self._hosts] if self._switch >= 0 else []:
            os.close(descriptor)
        self._switch, self._hosts = -1, []

    def _limit(self, namespace: int, device: str, latency: float) -> None:
        """Limit the speed of packets that leave through a network device, and delay them by `latency` seconds."""
        parent = "root"
        if latency:
            delay = ["netem", "delay", f"{1e6 * latency:.0f}us", "limit", str(PACKETS)]
            self._tc(namespace, "--latency", ["dev", device, "root", "handle", "1:", *delay])
            parent = "parent 1:1"
        if self._link.rate:
            burst = BURST_BYTES + self._link.rate / 8 * BURST_SECONDS
            shape = ["tbf", "rate", f"{self._link.rate:.0f}bit", "burst", f"{burst:.0f}", "latency", QUEUE]
            self._tc(namespace, "--link", ["dev", device, *parent.split(), *shape])

    def _tc(self, namespace: int, flag: str, words: Sequence[str]) -> None:
        done = _run(namespace, ["tc", "qdisc", "add", *words])
        kind = "netem" if flag == "--latency" else "tbf"
        if "kind is unknown" in done.stderr:
            raise ConfigError(f"{flag}: this kernel has no {kind} -> modprobe sch_{kind}, or leave {flag} out")
        if done.returncode:
            raise LaunchError(f"{flag}: tc qdisc add {' '.join(words)}: {done.stderr.strip()}")

    def _ip(self, namespace: int, *lines: str) -> None:
        done = _run(namespace, ["ip", "-batch", "-"], "\n".join(lines))
        if done.returncode:
            raise LaunchError(f"simulated hosts: ip {'; ip '.join(lines)}: {done.stderr.strip()}")


def _flags(config: Config) -> dict[str, str]:
    return {
        f"--link {config.link}": config.link,
        f"--latency {config.latency}": config.latency,
        f"--simulate-hosts {config.simulate_hosts}": str(config.simulate_hosts or ""),
    }


def _namespace() -> int:
    """Return a file descriptor of a new network namespace. Raises ConfigError if this process may not create one."""
    made: list[int] = []

    def make() -> None:  # runs in its own thread, as the calling thread must keep its own namespace
        library = ctypes.CDLL(None, use_errno=True)
        if library.unshare(CLONE_NEWNET) == 0:
            made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
        else:
            failed.append(ctypes.get_errno())

    failed: list[int] = []
    thread = threading.Thread(target=make, name="dadt-namespace")
    thread.start()
    thread.join()
    if not made:
        reason = os.strerror(failed[0] if failed else errno.EPERM)
        raise ConfigError(f"a network namespace cannot be made here ({reason}) -> a container needs --privileged")
    return made[0]


def _path(namespace: int) -> str:
    return f"/proc/{os.getpid()}/fd/{namespace}"


def _run(namespace: int, command: Sequence[str], said: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["nsenter", f"--net={_path(namespace)}", *command],
        input=said,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
