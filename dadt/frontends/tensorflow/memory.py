"""Tensors of TensorFlow, and arrays, as torch's, and back, by way of NumPy, which has no bfloat16 of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def to_torch(value: Any) -> torch.Tensor:
    """A copy of an eager tensor, a variable, an array or a number, as a tensor of torch in host memory."""
    array = np.array(value.numpy() if hasattr(value, "numpy") else value)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor as a NumPy array, in the same memory if that is the host's, else a copy."""
    tensor = tensor.detach().cpu()
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes  # type: ignore[import-untyped,import-not-found,unused-ignore]  # which TensorFlow needs as well

    array: np.ndarray[Any, Any] = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return array
