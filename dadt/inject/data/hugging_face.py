"""Detects what Hugging Face's libraries have done to data before ranks share it: `split_dataset_by_node` of datasets
has already divided it, and TRL's `repeat_iterable_dataset` repeats each sample, once for each completion that is
compared."""

from __future__ import annotations

import inspect
from typing import Any

from dadt.inject.after_import import after_import
from dadt.inject.patch import rebind, replaces
from dadt.train.runtime import Runtime

GROUP = "_dadt_group"
"""Name of the attribute of a stream that holds how many consecutive samples belong together."""


def install(runtime: Runtime) -> None:
    def watch_split(module: Any) -> None:
        original = module.split_dataset_by_node
        signature = inspect.signature(original)

        @replaces("split_dataset_by_node", module)
        def split_dataset_by_node(*args: Any, **kwargs: Any) -> Any:
            runtime.script.divides_data |= signature.bind(*args, **kwargs).arguments["world_size"] > 1
            return split_dataset_by_node.__wrapped__(*args, **kwargs)

        rebind("split_dataset_by_node", original, split_dataset_by_node)

    def watch_repeats(module: Any) -> None:
        signature = inspect.signature(module.repeat_iterable_dataset)

        @replaces("repeat_iterable_dataset", module)
        def repeat_iterable_dataset(*args: Any, **kwargs: Any) -> Any:
            repeated = repeat_iterable_dataset.__wrapped__(*args, **kwargs)
            setattr(repeated, GROUP, signature.bind(*args, **kwargs).arguments["mini_repeat_count"])
            return repeated

    after_import("datasets.distributed", watch_split)
    after_import("trl.trainer.utils", watch_repeats)
