"""Export of a job's metrics to other programs while it runs: one file here for each kind that `--metrics` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Protocol

from dadt.config.check import metrics_place
from dadt.errors import ConfigError
from dadt.launch.monitor.watch import View, Watch

EXPORTS = {"tensorboard": "TensorBoard", "prometheus": "Prometheus"}
"""Module to class. The module's name is also that of the extra of dadt that installs its dependencies."""


class Export(View, Protocol):
    """One destination of metrics. It is made before the job, so that a wrong one stops nothing later."""

    def __init__(self, place: str) -> None:
        """Raises ConfigError if the place cannot be used."""

    def begin(self, watch: Watch, facts: Mapping[str, str], warn: Callable[[str], None]) -> str:
        """Called once all ranks are known. facts: labels of the job, with `job` among them. Returns a text for the
        user that says where the metrics are."""


def prepare(texts: Sequence[str]) -> list[Export]:
    """Make an export for each KIND:WHERE of `--metrics`. Raises ConfigError, and then leaves none open."""
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
