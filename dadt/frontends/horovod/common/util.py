"""Horovod's queries of its build, such as `mpi_built`, and small helpers that scripts use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")


def gpu_available(ext_base_name: str = "torch", verbose: bool = False) -> bool:
    """Return whether torch finds a GPU."""
    import torch

    return torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    """Return whether this job exchanges tensors by MPI."""
    from dadt.frontends.horovod.torch import basics

    return basics.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """Return True, since torch contains Gloo."""
    return True


def nccl_built(verbose: bool = False) -> bool:
    """Return whether torch has NCCL."""
    from dadt.frontends.horovod.torch import basics

    return bool(basics.nccl_built())


def is_iterable(value: Any) -> bool:
    """Return whether the value can be iterated over."""
    return isinstance(value, Iterable)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether the number is a power of two."""
    return num_rank > 0 and not num_rank & (num_rank - 1)


def split_list(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Divide the items into `parts` parts of nearly the same length."""
    return [items[i * len(items) // parts : (i + 1) * len(items) // parts] for i in range(parts)]


@contextmanager
def env(**variables: str) -> Iterator[None]:
    """Set environment variables within a `with` block."""
    with patch.dict("os.environ", variables):
        yield
