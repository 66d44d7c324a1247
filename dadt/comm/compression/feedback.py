"""Error feedback (arXiv:1901.09847): the error that compression makes in one exchange is added to the values of the
next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dadt.comm.bucket import Bucket, plain
from dadt.comm.compression.base import Codec


class Owing:
    """Computes the factor by which the residual (compression error) of earlier exchanges counts in the next one."""

    def __init__(self) -> None:
        self._scale: torch.Tensor | None = None
        self._forgets = False

    def observe(self) -> dict[str, Any]:
        """Return the state for a snapshot: the residual's loss scale and, in subclasses, the residual itself. Call only
        while no exchange is in progress, and do not change the tensors: they stay in use."""
        return {"scale": self._scale, "forgets": self._forgets}

    def restore(self, own: dict[str, Any]) -> None:
        """Restore the state of a snapshot. own: the value that `observe` returned."""
        self._scale, self._forgets = own["scale"], own["forgets"]

    def forget(self) -> None:
        """Drop the residual, so that the next exchange starts without one."""
        self._forgets = True

    def keep(self, scale: torch.Tensor | None) -> torch.Tensor | float:
        """Return the factor for the residual in the next exchange: the ratio of loss scales, or 0 after forget().
        scale: the loss scale of the next exchange's gradients. The result is a tensor if the scale is one on a GPU,
        else a number.
        """
        before, self._scale = self._scale, scale
        forgets, self._forgets = self._forgets, False
        if forgets:
            return 0.0
        if before is scale:
            return 1.0
        ratio = (1.0 if scale is None else scale) / (1.0 if before is None else before)
        return ratio if isinstance(ratio, torch.Tensor) and ratio.is_cuda else float(ratio)


class Feedback(Owing):
    """The residual (compression error) of one rank in one bucket, as one float32 per value. The C++ engine's thread
    reads and writes it during an exchange."""

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self.codec = codec
        self._owed: torch.Tensor | None = None

    def owed(self, total: int, device: torch.device | None = None) -> torch.Tensor:
        """Return the residual of the bucket's `total` values on this device (None: in host memory). At the first call
        it is zero."""
        if self._owed is None:
            self._owed = torch.zeros(total, device=device or "cpu", dtype=torch.float32)
        # Restoring a snapshot may have put the residual on another device.
        if device is not None and self._owed.device != device:
            self._owed = self._owed.to(device)
        assert len(self._owed) == total, "a Feedback is of one bucket"
        return self._owed

    def observe(self) -> dict[str, Any]:
        return {**super().observe(), "owed": self._owed}

    def restore(self, own: dict[str, Any]) -> None:
        super().restore(own)
        self._owed = own["owed"]

    def arguments(self, total: int, scale: torch.Tensor | None = None) -> dict[str, Any]:
        """Return the keyword arguments for the next `Engine.allreduce` of `total` values. This object must stay alive
        until the allreduce is done, which uses its memory."""
        return {"codec": self.codec.core, "owed": self.owed(total).data_ptr(), "keep": float(self.keep(scale))}


class Unsent(Owing):
    """What the earlier compression of a bucket still owes that is not compressed any more. The next exchange sends it
    with this rank's gradients."""

    def __init__(self) -> None:
        super().__init__()
        self._owed: torch.Tensor | None = None

    def observe(self) -> dict[str, Any]:
        return {**super().observe(), "owed": self._owed, "unsent": True}

    def restore(self, own: dict[str, Any]) -> None:
        super().restore(own)
        self._owed = own["owed"]

    def added(
        self, bucket: Bucket, gradients: Sequence[torch.Tensor | None], scale: torch.Tensor | None
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the bucket's tensors with what is owed, as copies where anything is; nothing is owed
        after that, but of tensors without a gradient, which are not sent. scale: the loss scale of the gradients."""
        keep, owed, self._owed = self.keep(scale), self._owed, None
        if owed is None:
            return list(gradients)
        parts = torch.split(owed, [t.numel() for t in bucket.parts])
        with torch.no_grad():
            if any(g is None for g in gradients):
                pairs = zip(gradients, parts, strict=True)
                rest = torch.cat([o.mul(keep) if g is None else torch.zeros_like(o) for g, o in pairs])
                self._owed = rest if rest.any() else None
            return [
                # The residual is stored in the order in which the elements lie in memory.
                None if g is None else plain(g).add(o.mul(keep).as_strided(t.shape, s).to(g.device)).to(g.dtype)
                for g, o, t, s in zip(gradients, parts, bucket.parts, bucket.strides, strict=True)
            ]
