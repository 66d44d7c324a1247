"""Metadata that ranks send along with the gradients of a step, so that comparing the metadata needs no separate
exchange."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan

_FORMAT = struct.Struct("<IIIIIBddIIIdfd")


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Metadata that one rank sends to all ranks with one exchange. Its packed size is the same on every rank."""

    layout: int
    """crc32 of the shapes and dtypes of all exchanged tensors."""
    drawn: int
    """Number of batches drawn from shared loaders since the last exchange of this optimizer."""
    groups: int
    """crc32 of the optimizer's param_group values (learning rate and so on)."""
    fingerprint: int
    """Fingerprint of local gradients and inputs in the first exchanges, and of weights in some later ones; 0 if none
    was computed."""
    growth: int
    """crc32 of how many times a backward added to each gradient in this step, since the launch of buckets during
    backward depends on that."""
    redo: bool
    """Whether a backward added to gradients after their exchange was launched, so that all ranks must exchange once
    more."""
    weight: float
    """Weight of this rank's gradient in the mean over ranks."""
    value: float
    """Loss of an optimizer's closure, or a number that the algorithm sends to all ranks; 0 if there is neither."""
    not_finite: int = 0
    """1-based index of the first parameter whose gradient is not finite on this rank; 0 if there is none or gradients
    were not checked."""
    saves: int = 0
    """Number of orders to save that this rank has received from its agent, at most 63 because it is sent in 6 bits."""
    interrupted: bool = False
    """Whether this rank knows that the user has pressed Ctrl-C."""
    approach: int = 0
    """Number of the newest request of a new worker that this rank has received, 0 if none."""
    order: int = 0
    """crc32 of the sample orders of passes over shared loaders that began since the last exchange; 0 if none began."""
    loss: float = 0.0
    """Loss that the optimizer's closure returned, for optimizers that call it once per step and may use the loss."""
    square: float = nan
    """This rank's part of the squared norm of the averaged gradient, if momentum is sent and the script clips; NaN if
    not known."""
    density: float = nan
    """Number of targets by which this rank's loss divides, per unit of the rank's weight by samples; NaN if not
    known."""

    def pack(self) -> bytes:
        return _FORMAT.pack(
            self.layout,
            self.drawn,
            self.groups,
            self.fingerprint,
            self.growth,
            self.redo | min(self.saves, 63) << 1 | self.interrupted << 7,
            self.weight,
            self.value,
            self.not_finite,
            self.approach,
            self.order,
            self.loss,
            self.square,
            self.density,
        )

    @classmethod
    def unpack(cls, data: bytes) -> StepMetadata:
        a, b, c, d, e, bits, weight, value, *more = _FORMAT.unpack_from(data)
        not_finite, *rest = more
        redo, saves, interrupted = bool(bits & 1), bits >> 1 & 63, bool(bits & 128)
        return cls(a, b, c, d, e, redo, weight, value, not_finite, saves, interrupted, *rest)


def mean_loss(lanes: Sequence[StepMetadata]) -> float:
    """Return the mean of all ranks' losses, with the same weights as their gradients."""
    total = weighted = 0.0
    for lane in lanes:
        total += lane.weight
        weighted += lane.loss * lane.weight
    return weighted / total if total else 0.0


def mean_square(lanes: Sequence[StepMetadata]) -> float:
    """Return the squared norm of the averaged gradient; 0 if it is 0, or if a rank whose weight is not 0 does not know
    its part."""
    counting = [lane for lane in lanes if lane.weight > 0]
    total = sum(lane.weight for lane in counting)
    square = sum(lane.square * lane.weight for lane in counting) / total if counting else nan
    return 0.0 if isnan(square) else square


METADATA_BYTES = _FORMAT.size


def pack_flags(flags: Sequence[bool]) -> bytes:
    """Pack one bit per tensor, which says whether this rank has a gradient for the tensor."""
    # All flags are converted at once, because shifting one long number for each flag would take time proportional to
    # the square of their count.
    bits = int("".join(["01"[flag] for flag in reversed(flags)]) or "0", 2)
    return bits.to_bytes((len(flags) + 7) // 8, "little")


def any_flags(lanes: Sequence[bytes], count: int) -> list[bool]:
    """Return one flag per tensor, which says whether any rank has a gradient for the tensor."""
    bits = 0
    for lane in lanes:
        bits |= int.from_bytes(lane[: (count + 7) // 8], "little")
    if bits == (1 << count) - 1:
        return [True] * count
    return [bit == "1" for bit in reversed(f"{bits:0{count}b}"[-count:])] if count else []
