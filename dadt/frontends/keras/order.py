"""Makes all ranks read data in the same order, so that each rank can take its share."""

from __future__ import annotations

import importlib
import inspect
import random
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from dadt.inject import worker
from dadt.inject.after_import import after_import
from dadt.inject.patch import replaces

_local = threading.local()


def install() -> None:
    """Patch Keras and TensorFlow so that they shuffle data in the same way on all ranks."""
    module: Any = importlib.import_module("keras.src.trainers.data_adapters.py_dataset_adapter")
    module.random = _Shuffling()

    @replaces("__init__", module.PyDatasetAdapter)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        """Call the original constructor, and seed one random number generator for all epochs, in the training thread,
        since the data may be shuffled in another thread."""
        init.__wrapped__(self, *args, **kwargs)
        self._dadt_numbers = draw()
        if self.enqueuer is not None:
            self.enqueuer._dadt_numbers = self._dadt_numbers

    @replaces("_run", module.OrderedEnqueuer)
    def run(self: Any) -> None:
        """Load an epoch's data, in a thread, and shuffle it by the dataset's generator."""
        _local.numbers = self._dadt_numbers
        run.__wrapped__(self)

    @replaces("_finite_generator", module.PyDatasetAdapter)
    def generator(self: Any) -> Iterator[Any]:
        _local.numbers = self._dadt_numbers
        yield from generator.__wrapped__(self)

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


def _of_tensorflow(tf: Any) -> None:
    data = tf.data.Dataset
    _seed("shuffle", data)
    _seed("sample_from_datasets", data)
    _keep_order("map", data)
    _keep_order("interleave", data)


def _seed(name: str, kind: Any) -> None:
    """Patch a function that shuffles, so that it gets a seed that is the same on all ranks if the script gives none."""
    signature = inspect.signature(getattr(kind, name))

    @replaces(name, kind)
    def shuffle(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("seed") is None:
            given.arguments["seed"] = draw().getrandbits(31)
        return shuffle.__wrapped__(*given.args, **given.kwargs)


def _keep_order(name: str, kind: Any) -> None:
    """Patch a method of tf.data so that batches have a fixed order, even where the script allows any order."""
    signature = inspect.signature(getattr(kind, name))

    @replaces(name, kind)
    def read(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("deterministic") is False and not _is_explicit():
            given.arguments["deterministic"] = True
        return read.__wrapped__(*given.args, **given.kwargs)
