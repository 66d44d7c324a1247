"""A number of a GPU's that the host reads once it has come, and does not wait for."""

from __future__ import annotations

import torch


class Later:
    def __init__(self, value: torch.Tensor) -> None:
        """value: of one element, as it is when the current stream comes here."""
        self._value, self._came = value, None
        if value.is_cuda:
            self._value = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
            self._came = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._came.record(torch.cuda.current_stream(value.device))

    @property
    def done(self) -> bool:
        return self._came is None or bool(self._came.query())  # type: ignore[no-untyped-call]

    def read(self) -> float:
        """The number. Waits until it has come."""
        if self._came is not None and not self.done:
            self._came.synchronize()
        return float(self._value)
