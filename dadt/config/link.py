"""Parses `--link` and `--latency`, which simulate a network, or limit the speed of each connection between ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from dadt.errors import ConfigError

RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit", re.IGNORECASE)
LATENCY = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
PACED = "paced:"
_PACEABLE = ("auto", "tcp", "gloo", "null", "")
"""Executors that `--link paced:<speed>` can slow down, because all their traffic is TCP, or they have none."""


def rate_of(link: str) -> float:
    """Return the rate that the value of `--link` contains, in bits per second; 0 if it is empty. Raises ConfigError."""
    return _number("--link", link, RATE, "a speed as 100mbit, 1gbit or paced:1gbit") if link else 0.0


def latency_of(latency: str) -> float:
    """Return the latency that the value of `--latency` contains, in seconds; 0 if it is empty. Raises ConfigError."""
    return _number("--latency", latency, LATENCY, "a time as 500us or 5ms") if latency else 0.0


def pace_of(link: str) -> float:
    """Return the bytes per second to which `--link paced:<speed>` limits each connection between ranks; 0 for any other
    value of `--link`. Raises ConfigError."""
    return rate_of(link) / 8 if link.startswith(PACED) else 0.0


def simulates_hosts(link: str, latency: str, hosts: int) -> bool:
    """Return whether the job runs on simulated hosts, each with its own network, by one of these options."""
    return bool((link and not link.startswith(PACED)) or latency or hosts)


def check_link(link: str, latency: str, executors: Iterable[str], others: Mapping[str, Any]) -> None:
    """Raise ConfigError if `--link` or `--latency` is invalid, or conflicts with other options. others: values of the
    flags that name or simulate hosts, by flag."""
    latency_of(latency)
    if not pace_of(link):
        rate_of(link)
        return
    for name in executors:
        if name not in _PACEABLE:
            raise ConfigError(f"--link {link}: paces TCP connections, and --executor {name} has others -> give tcp")
    if given := next((name for name, value in {"--latency": latency, **others}.items() if value), ""):
        raise ConfigError(f"--link {link}: paces connections of workers on this host alone; leave {given} out")


def _number(flag: str, text: str, pattern: re.Pattern[str], expected: str) -> float:
    found = pattern.fullmatch(text.removeprefix(PACED if flag == "--link" else "").strip())
    value = float(found[1]) * UNITS[found[2].lower()] if found else 0.0
    if value <= 0:
        raise ConfigError(f"{flag} {text}: give {expected}")
    return value
