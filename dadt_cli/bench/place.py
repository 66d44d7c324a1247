"""Decides on which hosts the contenders of a benchmark run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dadt.config import Config
from dadt.config.check import flag
from dadt.config.link import PACED, pace_of
from dadt.errors import ConfigError

if TYPE_CHECKING:
    from dadt_cli.bench.party import Location

WHERE = ("config", "hosts", "hostfile", "gpu_visibility", "link", "latency", "simulate_hosts")
"""Flags that decide where workers run, for all contenders alike."""


def ranks_of(config: Config, given: int | None) -> int:
    if given is not None and given < 1:
        raise ConfigError(f"-np {given}: the number of workers must be 1 or more")
    if config.hosts or config.hostfile:
        if not config.np:
            raise ConfigError("-np N: say how many workers the hosts are to have")
        return config.np
    return config.np or max(2, config.simulate_hosts)


def _flags(given: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Return the flags among `names` that the user set, as arguments of a command line."""
    pairs = ((flag(name), given.get(name)) for name in names)
    return [
        part
        for name, value in pairs
        if value not in (None, ())
        for part in (name, ",".join(value) if isinstance(value, tuple) else str(value))
    ]


def location_of(config: Config, given: dict[str, Any]) -> Location:
    from dadt.launch.hosts import simulated
    from dadt.launch.start import plan
    from dadt_cli.bench.party import Location

    hosts = [] if simulated.wanted(config) else plan.hosts_of(replace(config, np=config.np or 1))
    return Location(_flags(given, WHERE), remote=not all(host.is_here for host in hosts))


def check_hosts(config: Config, ranks: int) -> None:
    """Check, before anything starts, that the simulated hosts can run `ranks` workers. Raises ConfigError if not."""
    from dadt.launch.hosts import simulated

    if simulated.wanted(config):
        simulated.hosts_and_slots(replace(config, np=ranks))


def network_of(config: Config) -> str:
    """Return a text for titles that describes the hosts and links of a benchmark."""
    hosts = f", {config.simulate_hosts} simulated hosts" if config.simulate_hosts else ""
    hosts += f", on {config.hosts or config.hostfile}" if config.hosts or config.hostfile else ""
    speed = config.link.removeprefix(PACED)
    link = f", connections paced to {speed}" if pace_of(config.link) else f", links of {speed}" if speed else ""
    return hosts + link + (f", latency {config.latency}" if config.latency else "")


def notes_on(config: Config) -> list[str]:
    """Return notes on which properties of a real network `--link paced:` does not simulate; empty without such a
    link."""
    if not pace_of(config.link):
        return []
    return [
        f"connections paced to {config.link.removeprefix(PACED)}: each pair of workers has its own, at this speed in"
        " each direction at once; without latency or loss, or a link that several of them share"
    ]
