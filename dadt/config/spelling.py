"""What other launchers call the same: flags, keys of a configuration file, variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec

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
