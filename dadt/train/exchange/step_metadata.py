"""Metadata that ranks send beside the gradients, in the same exchange: agreement at no extra cost."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

_FORMAT = struct.Struct("<IIIIIBddIIId")


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """One rank's side of one step's agreement. Packs to the same length on every rank."""

    layout: int
    """crc32 of shapes and dtypes of everything exchanged."""
    drawn: int
    """Batches drawn from shared loaders since the last exchange of this optimizer."""
    groups: int
    """crc32 of the optimizer's param_group values (learning rate and so on)."""
    fingerprint: int
    """crc32 of some elements of the local gradient, later of parameters that are not trained; 0: not taken."""
    growth: int
    """crc32 of how often each gradient grew in this step; what is launched from backward depends on it."""
    redo: bool
    """Gradients grew after their exchange was launched: all ranks exchange once more."""
    weight: float
    """The weight of this rank's gradient in the mean."""
    value: float
    """The loss of an optimizer's closure; else a number that the algorithm sends, 0 unless it has one to send."""
    not_finite: int = 0
    """Number, from 1, of the first parameter whose gradient is not finite here; 0: there is none, or nobody looked."""
    saves: int = 0
    """How often this rank has received the order that the script save; at most 63 count."""
    interrupted: bool = False
    """Whether this rank knows that the user has pressed Ctrl-C."""
    approach: int = 0
    """Number of the newest request of a new worker that this rank has received; 0: none."""
    order: int = 0
    """crc32 of the order in which passes over shared loaders draw that began since the last exchange; 0: none has."""
    loss: float = 0.0
    """What the closure gave that an optimizer calls once, if its step may use that."""

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
        )

    @classmethod
    def unpack(cls, data: bytes) -> StepMetadata:
        a, b, c, d, e, bits, weight, value, not_finite, approach, order, loss = _FORMAT.unpack_from(data)
        redo, saves, interrupted = bool(bits & 1), bits >> 1 & 63, bool(bits & 128)
        return cls(a, b, c, d, e, redo, weight, value, not_finite, saves, interrupted, approach, order, loss)


def mean_loss(lanes: Sequence[StepMetadata]) -> float:
    """The mean of all ranks' losses, weighted as their gradients are."""
    total = weighted = 0.0
    for lane in lanes:
        total += lane.weight
        weighted += lane.loss * lane.weight
    return weighted / total if total else 0.0


METADATA_BYTES = _FORMAT.size


def pack_flags(flags: Sequence[bool]) -> bytes:
    """One bit per tensor: this rank has a gradient for it."""
    # All at once, and not by shifts of one number, whose length would make each flag cost as much as all of them.
    bits = int("".join("01"[flag] for flag in reversed(flags)) or "0", 2)
    return bits.to_bytes((len(flags) + 7) // 8, "little")


def any_flags(lanes: Sequence[bytes], count: int) -> list[bool]:
    """Whether any rank has a gradient, per tensor."""
    bits = 0
    for lane in lanes:
        bits |= int.from_bytes(lane[: (count + 7) // 8], "little")
    if bits == (1 << count) - 1:
        return [True] * count
    return [bit == "1" for bit in reversed(f"{bits:0{count}b}"[-count:])] if count else []
