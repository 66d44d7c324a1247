"""Leaves the batches of Ray's datasets as they are, since `streaming_split` has already given each worker its share."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from dadt.errors import ConfigError
from dadt.inject.after_import import after_import
from dadt.train.runtime import Runtime

TOLD = "ray.data (streaming_split): shares out its data itself, left as it is."


def install(runtime: Runtime, min_np: int) -> None:
    """Report the first split of ray.data that is read. With --min-np, reading a split raises ConfigError."""

    def tell(module: Any) -> None:
        kind = module.DataIterator
        batches = kind.iter_torch_batches

        @functools.wraps(batches)
        def iter_torch_batches(self: Any, *args: Any, **kwargs: Any) -> Iterable[Any]:
            if type(self).__name__ == "StreamSplitDataIterator":
                if min_np:
                    raise ConfigError(
                        f"--min-np {min_np}: a streaming_split of ray.data waits at each pass for all who share it, so"
                        " training cannot go on without one of them; leave --min-np out"
                    )
                kind.iter_torch_batches = batches
                runtime.ranks.say(TOLD)
            found: Iterable[Any] = batches(self, *args, **kwargs)
            return found

        kind.iter_torch_batches = iter_torch_batches

    after_import("ray.data.iterator", tell)
