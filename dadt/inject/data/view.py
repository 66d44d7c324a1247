"""Objects like a loader, which torch iterates in its place."""

from __future__ import annotations

from typing import Any

from dadt.inject.data.samplers import Loader


def without_end(kind: type[Loader]) -> type[Loader]:
    """The loader's class, but for a __del__: what a loader of the script's own ends there is not the view's."""
    return type(kind.__name__, (kind,), {"__del__": lambda view: None}) if hasattr(kind, "__del__") else kind


def like(view: Loader, **changed: Any) -> Loader:
    """An object of its class with its attributes, and these in their place."""
    found: Loader = object.__new__(type(view))
    found.__dict__.update({**view.__dict__, "_iterator": None, **changed})
    return found
