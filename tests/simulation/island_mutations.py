"""Deliberate faults in what is decided about islands."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dadt.launch.ending.endings import Endings
from dadt.launch.members import islands


def alone(ranks: Collection[int], *given: Any, **facts: Any) -> Collection[int]:
    return ranks


ISLAND_MUTATIONS: Mapping[str, tuple[Any, str, Any]] = {
    "a lost rank leaves the rest of its island": (islands, "lost_with", alone),
    "who follows another one of its island is named": (Endings, "_early_exit_of_island", lambda self, rank: ""),
}
