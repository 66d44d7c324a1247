"""The models that can be benchmarked: each name maps to a factory, which returns a Workload."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dadt.errors import ConfigError

if TYPE_CHECKING:
    from dadt_cli.bench.models.workload import Workload

MODELS = {
    "resnet18": "dadt_cli.bench.models.resnet:resnet18",
    "resnet50": "dadt_cli.bench.models.resnet:resnet50",
    "resnet101": "dadt_cli.bench.models.resnet:resnet101",
    "vgg16": "dadt_cli.bench.models.vgg:vgg16",
    "bert-base": "dadt_cli.bench.models.transformer:bert_base",
    "gpt2-small": "dadt_cli.bench.models.transformer:gpt2_small",
    "mlp": "dadt_cli.bench.models.mlp:mlp",
}

SHARDED = {"fsdp": "dadt_cli.bench.models.transformer:sharded_gpt"}
"""Models that are sharded over several workers, which only `dadt bench fsdp` measures."""


def make(name: str) -> Workload:
    """Build the workload of a name in MODELS or SHARDED, or of `package.module:factory`, where the factory is a
    callable without arguments.

    The factory returns a Workload, or a plain tuple of its first fields: (model, batch, loss). Raises ConfigError if
    there is no such factory or its result does not fit.
    """
    module, colon, attribute = {**MODELS, **SHARDED}.get(name, name).partition(":")
    if not (colon and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ConfigError(f"--model {name}: give <module>:<factory>, or one of {', '.join(MODELS)}")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(f"--model {name}: there is no module {error.name} here") from error
    except AttributeError as error:
        raise ConfigError(f"--model {name}: {error}") from error
    return _workload(name, factory())


def _workload(name: str, made: Any) -> Workload:
    from torch import nn

    from dadt_cli.bench.models.workload import Workload

    fits = isinstance(made, tuple) and 3 <= len(made) <= len(Workload._fields)
    if not (fits and isinstance(made[0], nn.Module) and callable(made[1]) and callable(made[2])):
        raise ConfigError(
            f"--model {name}: the factory must return (model, batch, loss): a module, batch(size) -> tuple of tensors, "
            "and loss(model, *batch) -> scalar tensor"
        )
    return Workload(*made)
