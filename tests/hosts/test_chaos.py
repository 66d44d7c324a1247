"""Two of the faults that `make chaos` tries."""

from __future__ import annotations

import pytest
from hosts.chaos.trial import try_out


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [2, 5])
def test_what_is_promised_after_a_fault_is_kept(network_possible, seed):
    row = try_out(seed)
    assert row.kept, (row, row.text)
