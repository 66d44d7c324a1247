"""How gradients are split into buckets."""

from __future__ import annotations

import pytest
import torch

from dadt.comm.bucket import split

KB = 256  # elements of float32


def sizes(kilobytes: list[int], most: int, ends: int = 0) -> list[list[int]]:
    """The kilobytes of the tensors in each bucket."""
    tensors = [torch.empty(each * KB) for each in kilobytes]
    buckets = split(tensors, most << 10, turns=1, ends=ends << 10)
    return [[tensor.nbytes >> 10 for tensor in bucket.tensors] for bucket in buckets]


@pytest.mark.parametrize(
    ("kilobytes", "plain", "small_ends"),
    [
        ([1, 1, 1, 1], [[1, 1, 1, 1]], [[1, 1, 1, 1]]),  # one bucket is sent as a whole
        ([3, 5, 5, 5, 1, 1], [[3, 5], [5, 5], [1, 1]], [[3], [5, 5], [5], [1, 1]]),
        ([1, 1, 1, 9, 9, 1, 1, 1], [[1, 1, 1], [9], [9, 1], [1, 1]], [[1, 1], [1, 9], [9, 1], [1, 1]]),
        ([30, 1, 1, 30], [[30], [1, 1], [30]], [[30], [1, 1], [30]]),
        ([30], [[30]], [[30]]),
    ],
)
def test_the_first_and_the_last_of_several_buckets_are_small(kilobytes, plain, small_ends):
    assert sizes(kilobytes, 10) == plain
    assert sizes(kilobytes, 10, ends=2) == small_ends
    assert sizes(kilobytes, 10, ends=100) == sizes(kilobytes, 10, ends=10)


def test_each_dtype_has_its_own_buckets():
    tensors = [torch.empty(KB, dtype=each) for each in (torch.float32, torch.float64, torch.float32, torch.float64)]
    buckets = split(tensors, 3 << 10, ends=1 << 10)
    assert all(len({tensor.dtype for tensor in bucket.tensors}) == 1 for bucket in buckets)
    assert sorted(id(tensor) for bucket in buckets for tensor in bucket.tensors) == sorted(map(id, tensors))
