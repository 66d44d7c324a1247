"""How many have a tensor's memory, with torch's own function and without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dadt.train import storage


@pytest.mark.parametrize("uses", [storage.storage_uses, storage._read])
def test_each_view_and_each_storage_counts(uses: Callable[[int], int]) -> None:
    tensor = torch.zeros(4)
    memory = tensor.untyped_storage()
    before = uses(memory._cdata)
    views = [tensor[1:], tensor.view(2, 2), tensor.detach()]
    assert uses(memory._cdata) == before + len(views)
    del views
    assert uses(memory._cdata) == before == 2
