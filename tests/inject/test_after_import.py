"""Changes to modules that are imported later."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from dadt.inject.after_import import after_import


@pytest.fixture
def later(tmp_path, monkeypatch):
    (tmp_path / "imported_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("imported_later", None)


def test_all_changes_are_made_though_others_have_looked_for_the_module(later):
    made = []
    after_import("imported_later", lambda module: made.append(("first", module.value)))
    after_import("imported_later", lambda module: made.append(("second", module.value)))
    before = list(sys.meta_path)
    assert importlib.util.find_spec("imported_later") is not None  # as transformers does to see what is installed
    assert sys.meta_path == before and not made
    import imported_later

    assert sorted(made) == [("first", 1), ("second", 1)] and len(sys.meta_path) == len(before) - 2
    after_import("imported_later", lambda module: made.append(("at once", module is imported_later)))
    assert made[-1] == ("at once", True)
