"""CUDA graphs are left out of training: a graph's next run overwrites its gradients, perhaps before they were averaged,
and a step within one runs without DADT."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from dadt.errors import ConfigError
from dadt.train.runtime import Runtime

_OPTION = "triton.cudagraphs"
_MODES = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""Modes of torch.compile that make CUDA graphs, each with the mode that is the same without graphs."""
_BACKENDS = {"cudagraphs": "aot_eager"}


def install(runtime: Runtime) -> None:
    """Patch what makes graphs; `refuse_capture` is for those that the script captures itself."""
    compile_, graphed = torch.compile, torch.cuda.make_graphed_callables
    told = False

    def tell(what: str) -> None:
        nonlocal told
        if not told:
            runtime.ranks.say(
                f"{what} runs without CUDA graphs, in which gradients would change before they are averaged"
            )
        told = True

    @functools.wraps(compile_)
    def compile(model: Any = None, **options: Any) -> Any:
        changed = without_graphs(options)
        asked = options.get("backend") in (None, "inductor") and _forget_default()
        if (asked or changed != options) and torch.cuda.is_available():
            tell("torch.compile")
        return compile_(model, **changed)

    @functools.wraps(graphed)
    def make_graphed_callables(callables: Any, *args: Any, **kwargs: Any) -> Any:
        tell("torch.cuda.make_graphed_callables")
        return callables

    torch.compile = compile
    torch.cuda.make_graphed_callables = make_graphed_callables


def without_graphs(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of torch.compile, changed to those that make no graph where these would."""
    changed = dict(options)
    for name, others in (("mode", _MODES), ("backend", _BACKENDS)):
        if isinstance(given := options.get(name), str):
            changed[name] = others.get(given, given)
    if (chosen := options.get("options")) and chosen.get(_OPTION):
        changed["options"] = {**chosen, _OPTION: False}
    return changed


def _forget_default() -> bool:
    """Whether the script, or TORCHINDUCTOR_CUDAGRAPHS, has asked for graphs everywhere. From here on nobody has."""
    from torch._inductor import config  # the compiler's, which is loaded only now

    asked, config.triton.cudagraphs = bool(config.triton.cudagraphs), False
    return asked


def refuse_capture() -> None:
    """Called in each training step. Raises ConfigError where it is being captured."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        raise ConfigError(
            "the script captures a training step in a CUDA graph (torch.cuda.graph), which would then run without"
            " averaging; leave the capture out, or train in one process"
        )
