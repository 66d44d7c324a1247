"""Sparse allreduces that run in threads of their own."""

from __future__ import annotations

import pytest
from harness.patience import PATIENCE
from torch import Tensor

from dadt.api.sparse import _Later


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_whatever_ends_the_thread_is_raised_where_the_caller_waits(kind: type[BaseException]) -> None:
    def action() -> Tensor:
        raise kind("it ends")

    with pytest.raises(kind, match="it ends"):
        _Later(action).wait(PATIENCE)
