"""Wraps optimizers of scripts for Horovod when `--algorithm` is given, so that gradients are averaged by that
algorithm, for example one step late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeVar

import torch

from dadt.api import lifecycle
from dadt.api.optimizer import DistributedOptimizer
from dadt.errors import ConfigError
from dadt.frontends.horovod.torch.compression import Compression
from dadt.frontends.horovod.torch.process_sets import global_process_set
from dadt.frontends.horovod.torch.reduce_op import ReduceOp
from dadt.frontends.horovod.torch.subclass import Distributed, subclassed
from dadt.inject import worker

if TYPE_CHECKING:
    from torch import Tensor

    from dadt.frontends.horovod.torch.compression import Compressor
    from dadt.frontends.horovod.torch.process_sets import ProcessSet

T = TypeVar("T", bound=torch.optim.Optimizer)


def wrap(
    optimizer: T, names: dict[Tensor, str], op: ReduceOp, compression: type[Compressor], process_set: ProcessSet
) -> T:
    """Train the optimizer by the chosen `--algorithm`. Gradients accumulate until the step, so any number of backward
    passes works. Raises ConfigError for arguments that the algorithm does not support."""
    runtime = lifecycle.session().runtime
    how = f"--algorithm {runtime.ranks.config.algorithm}"
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise ConfigError(f"DistributedOptimizer(op=hvd.{op.name}): {how} averages or sums; leave {how} out")
    if process_set is not global_process_set:
        raise ConfigError(f"DistributedOptimizer(process_set=): {how} trains on all ranks; leave {how} out")
    if compression is not Compression.none:
        runtime.ranks.say(f"Compression.fp16 is the script's: {how} compresses by --compression", "warning")
    made = DistributedOptimizer(optimizer, reduction="sum" if op is ReduceOp.Sum else "mean")
    # `release` has nothing to remove, because the hooks that average gradients are those of DADT's own algorithm.
    return subclassed(made, _Delayed, SimpleNamespace(names=names, release=lambda: None))


class _Delayed(Distributed):
    """Methods that `wrap` adds to an optimizer."""

    def synchronize(self) -> None:
        """Put the gradients that the step will use into `.grad`, so that the script can clip or change them."""
        worker.average(self)  # type: ignore[arg-type]

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Does nothing, since `step` never averages gradients twice."""
        yield
