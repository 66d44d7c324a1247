"""What tests of training compare."""

from __future__ import annotations

import torch


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], what: str = "") -> None:
    """Bit for bit."""
    assert a.keys() == b.keys(), what
    for name in a:
        assert torch.equal(a[name], b[name]), f"{what}: {name} differs by {(a[name] - b[name]).abs().max():g}"
