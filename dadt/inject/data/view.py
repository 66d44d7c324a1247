"""Objects that look like a DataLoader or like its iterator: torch iterates over the first in place of the loader, and
the script over the second in place of torch's iterator."""

from __future__ import annotations

from typing import Any

from dadt.inject.data.samplers import Loader


class BatchView:
    """An iterator over batches that passes attribute reads on to the iterator `batches`, from which it gets them."""

    batches: Any

    def __iter__(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "batches" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.batches, name)


def without_end(kind: type[Loader]) -> type[Loader]:
    """Return the loader's class, or a subclass without its __del__ method: that method may release resources of the
    script's loader, which outlives the view."""
    return type(kind.__name__, (kind,), {"__del__": lambda view: None}) if hasattr(kind, "__del__") else kind


def like(view: Loader, **changed: Any) -> Loader:
    """Return an object of the same class as `view` with its attributes, except for those given in `changed`."""
    found: Loader = object.__new__(type(view))
    found.__dict__.update({**view.__dict__, "_iterator": None, **changed})
    return found
