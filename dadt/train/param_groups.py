"""Values in param_groups that a step reads besides parameters, such as learning rates. Ranks compare these values, and
may load those of rank 0."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def group_values(optimizer: torch.optim.Optimizer, *, wait: bool = False) -> list[dict[str, Any]]:
    """Return each param_group's plain values (learning rate, momentum, betas, ...), with one-element tensors as
    numbers.

    wait: whether to include values of tensors on a GPU, for which the host has to wait.
    """
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return [plain_values(group, wait=wait) for group in groups]


def plain_values(values: Mapping[str, Any], *, wait: bool = False) -> dict[str, Any]:
    """Return the values that ranks can compare, by name. wait: whether to include values of tensors on a GPU."""
    return {key: plain for key, value in sorted(values.items()) if (plain := _plain(value, wait)) is not _OTHER}


def take_values(optimizer: torch.optim.Optimizer, values: list[dict[str, Any]]) -> None:
    """Replace the param_group values by another rank's. Tensors in the param_groups stay the same objects, with new
    values."""
    for group, theirs in zip(optimizer.param_groups, values, strict=True):
        for key, value in theirs.items():
            group[key] = _taken(group.get(key), value)


def groups_crc(optimizer: torch.optim.Optimizer) -> int:
    """Return the crc32 of the optimizer's param_group values."""
    return zlib.crc32(repr(group_values(optimizer)).encode())


_OTHER = object()
"""Marks values that ranks cannot compare: functions, objects of the script, large tensors."""


def _plain(value: Any, wait: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.numel() == 1 and (wait or value.device.type == "cpu") else _OTHER
    if isinstance(value, (list, tuple)):  # for example Adam's betas
        plain = [_plain(each, wait) for each in value]
        return _OTHER if _OTHER in plain else tuple(plain) if isinstance(value, tuple) else plain
    if isinstance(value, np.generic):
        return value.item()
    # Only exact types count as plain values, so that an Enum derived from str is not one.
    return value if type(value) in (type(None), bool, int, float, str) else _OTHER


def _taken(own: Any, value: Any) -> Any:
    if isinstance(own, torch.Tensor):
        return own.fill_(value)
    if isinstance(value, (list, tuple)) and isinstance(own, (list, tuple)) and len(own) == len(value):
        return type(value)(map(_taken, own, value))
    return value
