"""Objects that look like a DataLoader or like its iterator: torch iterates over the former in place of the loader, the
script over the latter."""

from __future__ import annotations

from typing import Any

from dadt.inject.data.samplers import Loader


class BatchView:
    """An iterator over batches that has the attributes of the one behind it, `batches`."""

    batches: Any

    def __iter__(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "batches" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.batches, name)


def without_end(kind: type[Loader]) -> type[Loader]:
    """Return the loader's class, without the effect of its __del__: resources that the script's loader releases there
    do not belong to the view."""
    return type(kind.__name__, (kind,), {"__del__": lambda view: None}) if hasattr(kind, "__del__") else kind


def like(view: Loader, **changed: Any) -> Loader:
    """Return an object of the same class as `view` with its attributes, except for those given in `changed`."""
    found: Loader = object.__new__(type(view))
    found.__dict__.update({**view.__dict__, "_iterator": None, **changed})
    return found
