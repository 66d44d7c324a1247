"""Converts TensorFlow's tensors and arrays to torch and back, through NumPy, which has no bfloat16 of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def to_torch(value: Any) -> torch.Tensor:
    """Copy an eager tensor, a variable, an array or a number to a torch tensor in host memory."""
    array = np.array(value.numpy() if hasattr(value, "numpy") else value)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the tensor as a NumPy array, which shares the tensor's memory if the tensor is on the host, and otherwise
    is a copy."""
    tensor = tensor.detach().cpu()
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes  # type: ignore[import-untyped,import-not-found,unused-ignore]  # which TensorFlow needs as well

    array: np.ndarray[Any, Any] = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return array
