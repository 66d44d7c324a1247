"""Makes all ranks read data in the same order, so that each rank can take its share."""

from __future__ import annotations

import functools
import importlib
import inspect
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from dadt.inject import worker
from dadt.inject.after_import import after_import

_local = threading.local()


def install() -> None:
    """Patch Keras and TensorFlow so that they shuffle data in the same way on all ranks."""
    module: Any = importlib.import_module("keras.src.trainers.data_adapters.py_dataset_adapter")
    module.random = _Shuffling()
    adapter = module.PyDatasetAdapter
    adapter.__init__ = _drawing(adapter.__init__)
    adapter._finite_generator = _shuffling_within(adapter._finite_generator)
    module.OrderedEnqueuer._run = _shuffling(module.OrderedEnqueuer._run)
    after_import("tensorflow", _of_tensorflow)


def draw() -> random.Random:
    """Return a random number generator whose seed is the same on all ranks, except in scripts that call `dadt.init`."""
    with nullcontext() if _is_explicit() or worker.streams is None else worker.streams.shared():
        return random.Random(random.getrandbits(31))


def _is_explicit() -> bool:
    return worker.runtime is None or worker.runtime.script.explicit


class _Shuffling:
    """Replaces the module `random` where Keras shuffles the batches of a PyDataset. Each thread uses the generator of
    its dataset."""

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_local, "numbers", random), name)


def _drawing(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of Keras's PyDataset adapter, so that it seeds one random number generator for all epochs.
    The training thread does this, since the data may be shuffled in another thread."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._dadt_numbers = draw()
        if self.enqueuer is not None:
            self.enqueuer._dadt_numbers = self._dadt_numbers

    return __init__


def _shuffling(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the function of the thread that loads an epoch's data, so that it shuffles by the dataset's generator."""

    @functools.wraps(original)
    def _run(self: Any) -> None:
        _local.numbers = self._dadt_numbers
        original(self)

    return _run


def _shuffling_within(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    @functools.wraps(original)
    def generator(self: Any) -> Iterator[Any]:
        _local.numbers = self._dadt_numbers
        yield from original(self)

    return generator


def _of_tensorflow(tf: Any) -> None:
    data = tf.data.Dataset
    data.shuffle = _seeded(data.shuffle)
    data.sample_from_datasets = staticmethod(_seeded(data.sample_from_datasets))
    data.map, data.interleave = _in_order(data.map), _in_order(data.interleave)


def _seeded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that shuffles, so that it gets a seed that is the same on all ranks if the script gives no
    seed."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def shuffle(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("seed") is None:
            given.arguments["seed"] = draw().getrandbits(31)
        return original(*given.args, **given.kwargs)

    return shuffle


def _in_order(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of tf.data so that batches have a fixed order, even where the script allows any order."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def read(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("deterministic") is False and not _is_explicit():
            given.arguments["deterministic"] = True
        return original(*given.args, **given.kwargs)

    return read
