"""Makes orders of data that the script draws itself, as by `random.shuffle(dataset.items)`, the same on all ranks. Once
ranks have random streams of their own, functions that shuffle divided data draw from the stream that all ranks share;
otherwise some samples would be read twice and others not at all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
from torch.utils import data
from torch.utils.data import dataset as torch_dataset

from dadt.inject.data.seed import Streams
from dadt.inject.patch import replaces

FUNCTIONS = (
    (random, "shuffle"),
    (random, "sample"),
    (np.random, "shuffle"),
    (np.random, "permutation"),
    (np.random, "choice"),  # used by pandas to draw samples
)


class Shared(Protocol):
    """The attributes of the script's loaders that this module uses."""

    streams: Streams

    @property
    def shared(self) -> Iterable[Any]:
        """Data sets of the loaders that give each rank its share."""


def install(loaders: Shared) -> None:
    for module, name in FUNCTIONS:
        _draw_alike(loaders, name, module, concerns=lambda given: _is_of_data(loaders, given))
    _draw_alike(loaders, "random_split", data, torch_dataset, concerns=lambda given: True)


def _draw_alike(loaders: Shared, name: str, *modules: Any, concerns: Callable[[Any], bool]) -> None:
    """Patch a function to draw from the random stream that all ranks share, if `concerns` is true for its first
    argument, but not while an item of a batch is read."""

    @replaces(name, *modules)
    def draw(*args: Any, **kwargs: Any) -> Any:
        streams = loaders.streams
        if streams.divided and not streams.reads and args and concerns(args[0]):
            with streams.shared():
                return draw.__wrapped__(*args, **kwargs)
        return draw.__wrapped__(*args, **kwargs)


def _is_of_data(loaders: Shared, given: Any) -> bool:
    """Whether `given` is part of a data set that is divided among ranks, or has the same length as such a data set."""
    try:
        size = given if isinstance(given, int) else len(given)
    except TypeError:
        return False
    return any(any(each is given for each in _held(dataset)) or size == _size(dataset) for dataset in loaders.shared)


def _held(dataset: Any) -> Iterator[Any]:
    """Yield the data set and the values of its attributes, then those of the data set that it wraps, as Subset does, up
    to four levels."""
    for _ in range(4):
        members = getattr(dataset, "__dict__", {})
        yield from (dataset, *members.values())
        if (dataset := members.get("dataset")) is None:
            return


def _size(dataset: Any) -> int:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return -1
