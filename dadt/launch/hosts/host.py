"""The hosts of a job, as users name them in -H or a hostfile, or as a scheduler lists them."""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dadt.config import document
from dadt.errors import ConfigError

HOST = re.compile(
    r"(?:(?P<user>[^@\[\]:,\s]+)@)?(?:\[(?P<six>[\w:.%-]+)\]|(?P<name>[\w.-]+))(?::(?P<slots>[0-9]{1,9}))?"
)
SLOTS = re.compile(r"(slots|max[-_]slots)=([0-9]{1,9})")
"""Matches words of a hostfile: slots=N, which is the number of workers of a host, and max_slots=N, which is Open MPI's
upper limit of it."""
SHOWN = 400
"""Number of characters after which a list of hosts is cut off in a message."""
EXAMPLES = "give hosts as host1:2,user@host2:2,[::1]:2"


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A machine on which workers of a job may run; each host has one agent."""

    name: str
    """Name or address of the host, without brackets."""
    user: str = ""
    """User name for SSH; if empty, SSH's configuration decides."""
    slots: int = 0
    """Largest number of workers on the host; 0 means one per GPU, or a single one without GPUs."""

    def __str__(self) -> str:
        return self.name

    @property
    def login(self) -> str:
        """The host's name in the form that `ssh` and mpirun expect, with the user name if one is given."""
        return f"{self.user}@{self.name}" if self.user else self.name

    @property
    def is_here(self) -> bool:
        """Whether this host is the machine on which this process runs, because it has a name of this machine, or no
        name since the user named no hosts."""
        return not self.name or self.is_local

    @property
    def is_local(self) -> bool:
        """Whether the host's name is a name of the machine on which this process runs."""
        return self.name in ("localhost", "127.0.0.1", "::1", socket.gethostname()) and not self.user


def parse(text: str) -> list[Host]:
    """Return the hosts that the flag -H lists. Raises ConfigError."""
    where = f"-H {_brief(text)}"
    return _without_duplicates([_host(part.strip(), where) for part in text.split(",")], where)


def read(path: Path) -> list[Host]:
    """Return the hosts of a hostfile. The file may contain several lines for a host, since PBS and LSF write one line
    for each slot. Raises ConfigError."""
    hosts = _lines(document.read(path, "--hostfile"), f"{path},")
    if not hosts:
        raise ConfigError(f"--hostfile {path}: names no host; a line is `host slots=N`")
    return _added_up(hosts, str(path))


def parse_lines(text: str, source: str) -> list[Host]:
    """Return the hosts that a text lists, one per line. source: what error messages call the text. Raises
    ConfigError."""
    return _without_duplicates(_lines(text, source), source.removesuffix(","))


def _lines(text: str, source: str) -> list[Host]:
    """Return one Host for each line of a text that names a host, even if several lines name the same one."""
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{source} line {number}"
        host = _host(words[0], where)
        numbers = {"slots": host.slots} if host.slots else {}
        for word in words[1:]:
            found = SLOTS.fullmatch(word)
            if found is None or (name := found[1].replace("-", "_")) in numbers:
                raise ConfigError(f"{where}: {_brief(word)!r} is not understood; a line is `host slots=N`")
            numbers[name] = _slots(found[2], where)
        slots, most = numbers.get("slots", 0), numbers.get("max_slots", 0)
        if 0 < most < slots:
            raise ConfigError(f"{where}: slots={slots} is more than max_slots={most}")
        hosts.append(replace(host, slots=slots or most))
    return hosts


def _added_up(hosts: list[Host], where: str) -> list[Host]:
    """Return each host once, in the order of its first line, with the sum of its slots. If some host has several lines,
    lines without a number of slots count as one slot."""
    named = {host.name: host for host in reversed(hosts)}
    if len(named) == len(hosts):
        return hosts
    slots: Counter[str] = Counter()
    for host in hosts:
        if host.user != named[host.name].user:
            raise ConfigError(f"{where}: {host.name} stands there with two users; give one")
        slots[host.name] += host.slots or 1
    return [replace(named[name], slots=count) for name, count in slots.items()]


def choose(hosts: Sequence[Host], include: str, exclude: str, changing: bool = False) -> list[Host]:
    """Return the hosts that --include names, without those that --exclude names. changing: whether the list of hosts
    may change, so that the flags may name absent hosts and the result may be empty. Raises ConfigError."""
    chosen = list(hosts)
    for name, text in (("--include", include), ("--exclude", exclude)):
        if not text:
            continue
        names = {part.strip() for part in text.split(",")}
        if (unknown := names - {host.name for host in hosts}) and not changing:
            problem = (
                f"{_brief(', '.join(sorted(unknown)))} is not among the hosts {_brief(', '.join(map(str, hosts)))}"
            )
            raise ConfigError(f"{name} {_brief(text)}: {problem}")
        chosen = [host for host in chosen if (host.name in names) == (name == "--include")]
    if not (chosen or changing):
        raise ConfigError("--include and --exclude leave no host")
    return chosen


def with_slots(host: Host, slots: int) -> Host:
    """Return the host with `slots` slots, unless its number of slots is set already."""
    return host if host.slots else replace(host, slots=slots)


def _brief(text: str) -> str:
    """Return the text, cut to SHOWN characters if it is longer."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _host(text: str, where: str) -> Host:
    found = HOST.fullmatch(text)
    if found is None:
        raise ConfigError(f"{where}: {_brief(text)!r} is no host; {EXAMPLES}")
    slots = _slots(found["slots"], where) if found["slots"] else 0
    return Host(name=found["six"] or found["name"], user=found["user"] or "", slots=slots)


def _slots(text: str, where: str) -> int:
    if int(text) < 1:
        raise ConfigError(f"{where}: a host needs 1 slot or more; leave a host out that shall have none")
    return int(text)


def _without_duplicates(hosts: list[Host], where: str) -> list[Host]:
    times = Counter(host.name for host in hosts)
    for name, count in times.items():
        if count > 1:
            raise ConfigError(f"{where}: {name} stands there twice; name each host once, as {name}:{count}")
    return hosts
