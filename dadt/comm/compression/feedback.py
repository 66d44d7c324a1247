"""Error feedback (arXiv:1901.09847): what could not be said in one exchange is added to what is said in the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dadt.comm.compression.base import Codec


class Owing:
    """How much of what is owed from before still counts."""

    def __init__(self) -> None:
        self._scale: torch.Tensor | None = None
        self._forgets = False

    def observe(self) -> dict[str, Any]:
        """What this rank owes, as it is while no exchange is under way: for it alone, and not to be changed."""
        return {"scale": self._scale, "forgets": self._forgets}

    def restore(self, own: dict[str, Any]) -> None:
        """Go on with the same bits from what `observe` gave."""
        self._scale, self._forgets = own["scale"], own["forgets"]

    def forget(self) -> None:
        """The next exchange begins with nothing owed."""
        self._forgets = True

    def keep(self, scale: torch.Tensor | None) -> torch.Tensor | float:
        """The residual's factor in the next exchange, whose gradients have this scale; a tensor for one on a GPU."""
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
        """The residual for so many values, made at the first call, on that device (None: in host memory)."""
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
        """Arguments of the next `Engine.allreduce` of so many values. This object must live until that is done."""
        return {"codec": self.codec.core, "owed": self.owed(total).data_ptr(), "keep": float(self.keep(scale))}
