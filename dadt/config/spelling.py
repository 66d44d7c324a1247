"""Other names of settings (knobs): flags by which other launchers name the same setting, and misspelt environment
variables."""

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
"""Settings (knobs) for which horovodrun has a flag of another name, with that flag."""
HOROVOD_TIMELINE = "HOROVOD_TIMELINE"


def by_horovod(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the settings (knobs) given by Horovod's environment variables, which is at most the timeline.
    HOROVOD_TIMELINE is ignored if Horovod is installed and writes the timeline itself, or if the script is to begin the
    timeline (value DYNAMIC)."""
    path = env.get(HOROVOD_TIMELINE, "")
    return {"timeline": path} if path not in ("", "DYNAMIC") and find_spec("horovod") is None else {}


def misspelt(knobs: Iterable[Field[Any]], env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the DADT_* variables whose names are misspelt settings (knobs), each with the name that was probably
    meant."""
    known = {variable(knob.name) for knob in knobs}
    own = World().to_env()  # DADT sets these in each worker, whose script may run dadt
    near = {n: difflib.get_close_matches(n, known, 1, 0.85) for n in env if n.startswith("DADT_") and n not in own}
    return {name: found[0] for name, found in near.items() if found and name not in known}
