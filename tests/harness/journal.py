"""Reads what a job that still runs writes, line by line: of the newest one, not all may be there yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EVENTS = """
import json, os
def events(kind):
    with open(f"dadt-logs/{os.environ['DADT_JOB']}/events.jsonl") as file:
        whole = file.read().rpartition("\\n")[0]
    return [event for line in whole.splitlines() if (event := json.loads(line))["kind"] == kind]
"""
"""For scripts: what has happened in their job so far."""


def whole_lines(path: Path) -> list[Any]:
    """Return what the lines say that are there to their end; none where there is no file yet."""
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return list(map(json.loads, whole.splitlines()))
