"""What one DataLoader is for."""

from __future__ import annotations

from dadt.inject.data.division import begun
from dadt.inject.data.feed import Feed, LoadingRank
from dadt.inject.data.samplers import Loader

TRAINS, EVALUATES, ALONE = "trains", "evaluates", "alone"


class Role:
    """The state of one loader."""

    def __init__(self, number: int, runtime: LoadingRank) -> None:
        self.number = number
        self.name = f"DataLoader #{number}"
        self.kind = ""
        """Empty until it is fixed."""
        self.gives_all = False
        """In its latest pass."""
        self.unused = False
        """An iterator was made while the role was undecided, and no batch asked of it so far."""
        self.has_trained = False
        self.is_doubted = False
        """It evaluates unless a backward follows."""
        self.views: dict[bool, Loader] = {}
        """The views by which it gives all, and each rank its share."""
        self.division = begun(runtime)
        """Among whom its latest pass was divided."""
        self.feed: Feed | None = None
        """The feed of persistent workers."""
