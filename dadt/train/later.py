"""A number in GPU memory that the host reads once it has been copied, without waiting for it."""

from __future__ import annotations

import torch


class Later:
    def __init__(self, value: torch.Tensor) -> None:
        """value: tensor with one element, copied as it is at this point of the current CUDA stream."""
        self._value, self._came = value, None
        if value.is_cuda:
            self._value = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
            self._came = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._came.record(torch.cuda.current_stream(value.device))

    @property
    def done(self) -> bool:
        return self._came is None or bool(self._came.query())  # type: ignore[no-untyped-call]

    def read(self) -> float:
        """Return the number, after waiting for its copy to the host."""
        if self._came is not None and not self.done:
            self._came.synchronize()
        return float(self._value)
