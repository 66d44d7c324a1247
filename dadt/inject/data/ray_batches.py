"""Leaves the batches of Ray's datasets as they are, since `streaming_split` has already given each worker its share."""

from __future__ import annotations

from typing import Any

from dadt.errors import ConfigError
from dadt.inject.after_import import after_import
from dadt.inject.patch import replaces
from dadt.train.runtime import Runtime

TOLD = "ray.data (streaming_split): shares out its data itself, left as it is."


def install(runtime: Runtime, min_np: int) -> None:
    """Tell the user about the first split of a Ray data set that is read. With --min-np, reading a split raises
    ConfigError."""

    def tell(module: Any) -> None:
        kind = module.DataIterator

        @replaces("iter_torch_batches", kind)
        def iter_torch_batches(self: Any, *args: Any, **kwargs: Any) -> Any:
            if type(self).__name__ == "StreamSplitDataIterator":
                if min_np:
                    raise ConfigError(
                        f"--min-np {min_np}: a streaming_split of ray.data waits at each pass for all who share it, so"
                        " training cannot go on without one of them; leave --min-np out"
                    )
                kind.iter_torch_batches = iter_torch_batches.__wrapped__
                runtime.ranks.say(TOLD)
            return iter_torch_batches.__wrapped__(self, *args, **kwargs)

    after_import("ray.data.iterator", tell)
