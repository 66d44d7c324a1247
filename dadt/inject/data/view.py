"""Creates copies of a DataLoader's attributes in new objects, which torch iterates in place of the loader."""

from __future__ import annotations

from typing import Any

from dadt.inject.data.samplers import Loader


def without_end(kind: type[Loader]) -> type[Loader]:
    """Return the loader's class, without the effect of its __del__: resources that the script's loader releases there
    do not belong to the view."""
    return type(kind.__name__, (kind,), {"__del__": lambda view: None}) if hasattr(kind, "__del__") else kind


def like(view: Loader, **changed: Any) -> Loader:
    """Return an object of the same class as `view` with its attributes, except for those given in `changed`."""
    found: Loader = object.__new__(type(view))
    found.__dict__.update({**view.__dict__, "_iterator": None, **changed})
    return found
