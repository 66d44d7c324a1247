"""What `--link` and `--latency` say: a simulated network, or a pace for each connection between ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from dadt.errors import ConfigError

RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit", re.IGNORECASE)
LATENCY = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
PACED = "paced:"
_PACEABLE = ("auto", "gloo", "null", "")
"""Executors that exchange over TCP alone, or nothing."""


def rate_of(link: str) -> float:
    """The bits per second of `--link`; 0 if it is empty. Raises ConfigError."""
    return _number("--link", link, RATE, "a speed as 100mbit, 1gbit or paced:1gbit") if link else 0.0


def latency_of(latency: str) -> float:
    """The seconds of `--latency`; 0 if it is empty. Raises ConfigError."""
    return _number("--latency", latency, LATENCY, "a time as 500us or 5ms") if latency else 0.0


def pace_of(link: str) -> float:
    """Bytes per second of each connection between ranks, 0 where none is paced. Raises ConfigError."""
    return rate_of(link) / 8 if link.startswith(PACED) else 0.0


def simulates_hosts(link: str, latency: str, hosts: int) -> bool:
    """Whether hosts are simulated, each with a network of its own."""
    return bool((link and not link.startswith(PACED)) or latency or hosts)


def check_link(link: str, latency: str, executors: Iterable[str], others: Mapping[str, Any]) -> None:
    """others: flags that name or simulate hosts, with their values. Raises ConfigError."""
    latency_of(latency)
    if not pace_of(link):
        rate_of(link)
        return
    for name in executors:
        if name not in _PACEABLE:
            raise ConfigError(f"--link {link}: paces TCP connections, and --executor {name} has others -> give gloo")
    if given := next((name for name, value in {"--latency": latency, **others}.items() if value), ""):
        raise ConfigError(f"--link {link}: paces connections of workers on this host alone; leave {given} out")


def _number(flag: str, text: str, pattern: re.Pattern[str], expected: str) -> float:
    found = pattern.fullmatch(text.removeprefix(PACED if flag == "--link" else "").strip())
    value = float(found[1]) * UNITS[found[2].lower()] if found else 0.0
    if value <= 0:
        raise ConfigError(f"{flag} {text}: give {expected}")
    return value
