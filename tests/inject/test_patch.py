"""Functions that are put in the place of others."""

from __future__ import annotations

import sys
from types import ModuleType

from dadt.inject.patch import rebind


class Posing:
    """Says that it is a module, as cffi's libraries do, and has no dictionary."""

    __slots__ = ()
    __class__ = ModuleType  # type: ignore[assignment]


def test_what_only_poses_as_a_module_is_passed_over(monkeypatch) -> None:
    user = ModuleType("user")
    user.work, user.other = len, len  # type: ignore[attr-defined]
    posing = Posing()
    assert isinstance(posing, ModuleType) and not hasattr(posing, "__dict__")
    for name, module in {"posing": posing, "none": None, "user": user}.items():
        monkeypatch.setitem(sys.modules, name, module)
    rebind("work", len, max)
    assert user.work is max and user.other is len
