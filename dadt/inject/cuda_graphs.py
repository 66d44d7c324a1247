"""Keeps CUDA graphs out of training: the next run of a graph overwrites its gradients, perhaps before they were
averaged, and an optimizer step inside a graph would run without DADT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dadt.errors import ConfigError
from dadt.inject.patch import replaces
from dadt.train.runtime import Runtime

_OPTION = "triton.cudagraphs"
_MODES = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""Modes of torch.compile that use CUDA graphs, each with the most similar mode without CUDA graphs."""
_BACKENDS = {"cudagraphs": "aot_eager"}


def install(runtime: Runtime) -> None:
    """Patch the functions of torch that create CUDA graphs, so that they create none. If the script captures a graph
    itself, `refuse_capture` raises an error."""
    told = False

    def tell(what: str) -> None:
        nonlocal told
        if not told:
            runtime.ranks.say(
                f"{what} runs without CUDA graphs, in which gradients would change before they are averaged"
            )
        told = True

    @replaces("compile", torch)
    def compile(model: Any = None, **options: Any) -> Any:
        changed = without_graphs(options)
        asked = options.get("backend") in (None, "inductor") and _forget_default()
        if (asked or changed != options) and torch.cuda.is_available():
            tell("torch.compile")
        return compile.__wrapped__(model, **changed)

    @replaces("make_graphed_callables", torch.cuda)
    def make_graphed_callables(callables: Any, *args: Any, **kwargs: Any) -> Any:
        tell("torch.cuda.make_graphed_callables")
        return callables


def without_graphs(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of torch.compile, changed so that torch.compile makes no CUDA graphs."""
    changed = dict(options)
    for name, others in (("mode", _MODES), ("backend", _BACKENDS)):
        if isinstance(given := options.get(name), str):
            changed[name] = others.get(given, given)
    if (chosen := options.get("options")) and chosen.get(_OPTION):
        changed["options"] = {**chosen, _OPTION: False}
    return changed


def _forget_default() -> bool:
    """Turn CUDA graphs off in the compiler's global settings. Return whether the script, or the variable
    TORCHINDUCTOR_CUDAGRAPHS, had turned them on."""
    # Imported in the function, because the import loads torch's compiler, which only scripts that compile need.
    from torch._inductor import config

    asked, config.triton.cudagraphs = bool(config.triton.cudagraphs), False
    return asked


def refuse_capture() -> None:
    """Raise ConfigError if the current training step is being captured in a CUDA graph."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        raise ConfigError(
            "the script captures a training step in a CUDA graph (torch.cuda.graph), which would then run without"
            " averaging; leave the capture out, or train in one process"
        )
