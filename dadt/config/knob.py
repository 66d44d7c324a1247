"""Defines a knob: a field of Config with the help text of its flag."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def knob(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    advanced: bool = False,
    launch: bool = False,
    flags: tuple[str, ...] = (),
    metavar: str = "",
) -> Any:
    """Return a field of Config, with the help text of its flag.

    advanced: only --help-all shows the flag. launch: the setting concerns the launcher only and is not passed on to
    workers. flags: other names of the flag.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "advanced": advanced,
        "launch": launch,
        "flags": flags,
        "metavar": metavar,
    }
    return field(default=default, metadata=metadata)


def launch_knob(default: Any, help: str, **options: Any) -> Any:
    return knob(default, help, launch=True, **options)
