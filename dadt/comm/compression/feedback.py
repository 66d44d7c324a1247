"""Error feedback (arXiv:1901.09847): what could not be said in one exchange is added to what is said in the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dadt.comm.compression.base import Codec


class Owing:
    """The factor by which the residual of earlier exchanges counts in the next one."""

    def __init__(self) -> None:
        self._scale: torch.Tensor | None = None
        self._forgets = False

    def observe(self) -> dict[str, Any]:
        """This rank's residual and its scale, while no exchange is under way. Only to be read: the tensors are in
        use."""
        return {"scale": self._scale, "forgets": self._forgets}

    def restore(self, own: dict[str, Any]) -> None:
        """Restore exactly what `observe` gave."""
        self._scale, self._forgets = own["scale"], own["forgets"]

    def forget(self) -> None:
        """Let the next exchange begin with no residual."""
        self._forgets = True

    def keep(self, scale: torch.Tensor | None) -> torch.Tensor | float:
        """The residual's factor in the next exchange. scale: the loss scale of that exchange's gradients. A tensor if
        the scale is one on a GPU, else a number."""
        before, self._scale = self._scale, scale
        forgets, self._forgets = self._forgets, False
        if forgets:
            return 0.0
        if before is scale:
            return 1.0
        ratio = (1.0 if scale is None else scale) / (1.0 if before is None else before)
        return ratio if isinstance(ratio, torch.Tensor) and ratio.is_cuda else float(ratio)


class Feedback(Owing):
    """The residual of one rank in one bucket: a float32 for each of its values. The engine's thread uses it."""

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self.codec = codec
        self._owed: torch.Tensor | None = None

    def owed(self, total: int, device: torch.device | None = None) -> torch.Tensor:
        """The residual of `total` values, on this device (None: in host memory); zeros at the first call."""
        if self._owed is None:
            self._owed = torch.zeros(total, device=device or "cpu", dtype=torch.float32)
        if device is not None and self._owed.device != device:  # from a snapshot
            self._owed = self._owed.to(device)
        assert len(self._owed) == total, "a Feedback is of one bucket"
        return self._owed

    def observe(self) -> dict[str, Any]:
        return {**super().observe(), "owed": self._owed}

    def restore(self, own: dict[str, Any]) -> None:
        super().restore(own)
        self._owed = own["owed"]

    def arguments(self, total: int, scale: torch.Tensor | None = None) -> dict[str, Any]:
        """Keyword arguments of the next `Engine.allreduce`, of `total` values. This object must live until that is
        done."""
        return {"codec": self.codec.core, "owed": self.owed(total).data_ptr(), "keep": float(self.keep(scale))}
