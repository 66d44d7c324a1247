"""What tests of training compare."""

from __future__ import annotations

import torch


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], what: str = "") -> None:
    """Bit for bit."""
    assert a.keys() == b.keys(), what
    for name in a:
        assert torch.equal(a[name], b[name]), f"{what}: {name} differs by {(a[name] - b[name]).abs().max():g}"


def assert_near(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], what: str = "") -> None:
    """But for rounding."""
    assert a.keys() == b.keys(), what
    for name in a:
        far = (a[name] - b[name]).abs().max()
        assert torch.allclose(a[name], b[name], rtol=1e-4, atol=2e-5), f"{what}: {name} differs by {far:g}"


def assert_replicas_equal(run) -> None:
    for other in run.ranks[1:]:
        assert_equal(run.ranks[0]["state"], other["state"], "replicas")
