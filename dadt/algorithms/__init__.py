"""Training algorithms, which decide what data ranks exchange, when, and how the result changes the weights. Each
algorithm is a file or folder of this package, listed in dadt/config/extensions.py."""

from __future__ import annotations

import traceback
from importlib import import_module
from types import ModuleType

from dadt.config.extensions import ALGORITHMS
from dadt.errors import ConfigError
from dadt.train.algorithm import Algorithm


def find(name: str) -> type[Algorithm]:
    """Return the algorithm class of this name: a built-in one, or the user's own as "package.module:Class". Raises
    ConfigError if there is none."""
    if name in ALGORITHMS:
        path, _, cls = ALGORITHMS[name].partition(":")
        return getattr(import_module(path), cls)  # type: ignore[no-any-return]
    path, _, cls = name.partition(":")
    found = getattr(_import(name, path), cls, None)
    if found is None:
        raise ConfigError(f"--algorithm {name}: {path} has no {cls}")
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ConfigError(f"--algorithm {name}: {cls} is no subclass of dadt.algorithms.Algorithm")
    if found.__abstractmethods__:
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"--algorithm {name}: {cls} lacks {missing}")
    return found


def _import(name: str, path: str) -> ModuleType:
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name and f"{path}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"--algorithm {name}: there is no module {error.name}, neither beside the script, in PYTHONPATH nor"
                " installed"
            ) from error
        raise ConfigError(f"--algorithm {name}: {path} cannot be imported: {error}") from error
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"--algorithm {name}: {path} cannot be imported: {type(error).__name__}: {error}"
            f" ({where.filename}, line {where.lineno})"
        ) from error


__all__ = ["Algorithm", "find"]
