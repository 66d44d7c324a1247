"""Exports a job's metrics to other programs while the job runs. This package has one module for each KIND that
`--metrics` accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Protocol

from dadt.config.check import metrics_place
from dadt.errors import ConfigError
from dadt.launch.monitor.watch import View, Watch

EXPORTS = {"tensorboard": "TensorBoard", "prometheus": "Prometheus"}
"""For each module of this package, the name of its export class. The optional extra of the package dadt that installs
what the module needs has the same name as the module."""


class Export(View, Protocol):
    """Base class of destinations for metrics. An export is created before the job starts, so that a wrong destination
    is reported before any work is done."""

    def __init__(self, place: str) -> None:
        """place: the part of `--metrics KIND:WHERE` after the colon. Raises ConfigError if the destination cannot be
        used."""

    def begin(self, watch: Watch, facts: Mapping[str, str], warn: Callable[[str], None]) -> str:
        """Begin to export. Called once all ranks have their places. facts: the labels of the job by name, including its
        id as `job`. warn: called with a text for the user on errors. Returns a text for the user that says where the
        metrics are."""


def prepare(texts: Sequence[str]) -> list[Export]:
    """Create an export for each KIND:WHERE of `--metrics`. Raises ConfigError, after closing those already created."""
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
        problem = f"needs {error.name}, which is not installed -> pip install 'dadt[{kind}]'"
        raise ConfigError(f"--metrics {kind}:{place}: {problem}") from error
    export: Export = getattr(module, EXPORTS[kind])(place)
    return export
