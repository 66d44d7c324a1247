"""Other names for knobs: those that other launchers have for the same, and variables that are misspelt."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import Field
from importlib.util import find_spec
from typing import Any

from dadt.config.check import variable
from dadt.world import World

HOROVODRUN = {
    "cycle_duration_ms": "--cycle-time-ms",
    "log_dir": "--output-filename",
    "min_np": "--min-num-proc",
    "network_interface": "--network-interfaces",
    "stall_warning": "--stall-check-warning-time-seconds",
    "timeline": "--timeline-filename",
}
"""Flags of horovodrun's that mean the same as a knob under another name."""
HOROVOD_TIMELINE = "HOROVOD_TIMELINE"


def by_horovod(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The knobs that Horovod's variables set: the timeline alone, and not where an installed Horovod writes it, nor
    where the script is to begin it (DYNAMIC)."""
    path = env.get(HOROVOD_TIMELINE, "")
    return {"timeline": path} if path not in ("", "DYNAMIC") and find_spec("horovod") is None else {}


def misspelt(knobs: Iterable[Field[Any]], env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that look like a knob's but are not, each with the name that was probably meant."""
    known = {variable(knob.name) for knob in knobs}
    own = World().to_env()  # present when a worker's script calls dadt
    near = {n: difflib.get_close_matches(n, known, 1, 0.85) for n in env if n.startswith("DADT_") and n not in own}
    return {name: found[0] for name, found in near.items() if found and name not in known}
