"""Patches Keras, on torch or TensorFlow, when a script has imported Keras or wraps one of its optimizers."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch  # noqa: F401 (first, as its own hook starts this rank)

from dadt.frontends.keras import order
from dadt.frontends.keras.fit import KerasTraining
from dadt.frontends.keras.on_tensorflow import TensorFlowTraining
from dadt.frontends.keras.on_torch import TorchTraining
from dadt.inject import worker
from dadt.train.runtime import Runtime

BACKENDS: dict[str, Callable[[Runtime], KerasTraining]] = {"torch": TorchTraining, "tensorflow": TensorFlowTraining}
_installed: list[KerasTraining] = []


def hook() -> None:
    """Make Keras's training data-parallel; called when keras has been imported. Does nothing if Keras's backend is none
    of BACKENDS, or there is only one rank."""
    keras = importlib.import_module("keras")
    runtime = worker.runtime
    if keras.backend.backend() in BACKENDS and runtime is not None and not runtime.ranks.alone:
        install(runtime)


def install(runtime: Runtime) -> KerasTraining:
    """Patch Keras, once, so that it trains data-parallel on its backend. Returns the hooks of the backend."""
    if not _installed:
        keras = importlib.import_module("keras")
        order.install()
        _installed.append(BACKENDS[keras.backend.backend()](runtime))
        _installed[0].install(keras)
    return _installed[0]
