"""What gives a job's figures to other programs while it runs: a file here for each, which `--metrics` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Protocol

from dadt.config.check import metrics_place
from dadt.errors import ConfigError
from dadt.launch.monitor.watch import View, Watch

EXPORTS = {"tensorboard": "TensorBoard", "prometheus": "Prometheus"}
"""Module, which is the extra of dadt's that brings what it needs, and class."""


class Export(View, Protocol):
    """One place that a job's figures go to. Made before the job, so that what is wrong with it stops nothing later."""

    def __init__(self, place: str) -> None:
        """Raises ConfigError where it cannot be."""

    def begin(self, watch: Watch, facts: Mapping[str, str], warn: Callable[[str], None]) -> str:
        """All ranks are known. facts: of the job, its `job` among them. Returns where the figures are, for the user."""


def prepare(texts: Sequence[str]) -> list[Export]:
    """Of each KIND:WHERE of `--metrics`. Raises ConfigError; then none is left open."""
    made: list[Export] = []
    try:
        for text in texts:
            made.append(_prepare(*metrics_place(text)))
    except ConfigError:
        for export in made:
            export.close()
        raise
    return made


def _prepare(kind: str, place: str) -> Export:
    try:
        module = import_module(f"{__name__}.{kind}")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--metrics {kind}:{place}: needs {error.name}, which is not installed -> pip install 'dadt[{kind}]'"
        ) from error
    export: Export = getattr(module, EXPORTS[kind])(place)
    return export
