"""Orders that the script itself draws, as by `random.shuffle(dataset.items)`: once ranks have random numbers of their
own, those of data that is shared out come from the shared stream, or samples would be read twice and left out."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
from torch.utils import data
from torch.utils.data import dataset as torch_dataset

from dadt.inject.data.seed import Streams

FUNCTIONS = (
    (random, "shuffle"),
    (random, "sample"),
    (np.random, "shuffle"),
    (np.random, "permutation"),
    (np.random, "choice"),  # by which pandas samples
)


class Shared(Protocol):
    """The loaders of the script."""

    streams: Streams

    @property
    def shared(self) -> Iterable[Any]:
        """The data sets of those that give each rank its share."""


def install(loaders: Shared) -> None:
    for module, name in FUNCTIONS:
        setattr(module, name, _common(loaders, getattr(module, name), lambda given: _is_of_data(loaders, given)))
    split = _common(loaders, torch_dataset.random_split, lambda given: True)
    data.random_split = torch_dataset.random_split = split


def _common(loaders: Shared, original: Callable[..., Any], concerns: Callable[[Any], bool]) -> Callable[..., Any]:
    """It draws from the shared stream where what it is given concerns all ranks, but not for an item of a batch."""

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        streams = loaders.streams
        if streams.divided and not streams.reads and args and concerns(args[0]):
            with streams.shared():
                return original(*args, **kwargs)
        return original(*args, **kwargs)

    return draw


def _is_of_data(loaders: Shared, given: Any) -> bool:
    """Whether it is something that such a data set holds, or as long as one."""
    try:
        size = given if isinstance(given, int) else len(given)
    except TypeError:
        return False
    return any(any(each is given for each in _held(dataset)) or size == _size(dataset) for dataset in loaders.shared)


def _held(dataset: Any) -> Iterator[Any]:
    """The data set and what it has, also the one below a Subset or the like."""
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
