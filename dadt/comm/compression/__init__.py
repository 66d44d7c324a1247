"""Compression of gradients and weights on their way between ranks. Each codec is one file of this folder, and one line
in this module."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from dadt.comm.bucket import Bucket
from dadt.comm.compression.base import BLOCK, FLOATS, Codec
from dadt.comm.compression.feedback import Feedback, Unsent
from dadt.comm.compression.half import BFLOAT16, FLOAT16
from dadt.comm.compression.integers import INT4, INT8
from dadt.comm.compression.powersgd import LowRank
from dadt.comm.compression.signs import BITS1, BITS2

CODECS: dict[str, Codec] = {"bf16": BFLOAT16, "fp16": FLOAT16, "int8": INT8, "int4": INT4}
OF_MOMENTUM: dict[str, Codec] = {"momentum:1": BITS1, "momentum:2": BITS2}
"""Codec for the optimizer's momentum under each `--compression momentum:N`. Gradients are sent as int4 under these
values."""

Form = Feedback | Unsent | LowRank
"""The compression state of one bucket, which is carried from one exchange to the next."""


def forms(
    name: str, buckets: Sequence[Bucket], *, momentum: bool = False, finely: Set[torch.Tensor] = frozenset()
) -> list[Form | None]:
    """Return the compression state of each bucket, or None for buckets that are not compressed. name: the value of
    --compression, such as "int8" or "powersgd:4". momentum: whether the buckets send momentum, not gradients. finely:
    tensors whose momentum needs more bits; a bucket has these alone or none of them."""
    family, _, rank = name.partition(":")
    if family == "powersgd":
        made = [LowRank(b, int(rank)) if b.dtype in FLOATS else None for b in buckets]
        return [form if form is not None and form.matrices else None for form in made]
    of_gradients = INT4 if name in OF_MOMENTUM else CODECS.get(name)
    codecs = [OF_MOMENTUM[name] if momentum and b.tensors[0] not in finely else of_gradients for b in buckets]
    return [Feedback(c) if c and _saves(c, b.dtype) else None for c, b in zip(codecs, buckets, strict=True)]


def carried(before: Sequence[Form | None], after: Sequence[Form | None]) -> list[Form | None]:
    """Return the compressions `after` of the same buckets' gradients, which owe what `before` still owes. What low-rank
    approximation owes is dropped."""
    return [_carried(old, new) for old, new in zip(before, after, strict=True)]


def _carried(before: Form | None, after: Form | None) -> Form | None:
    if before is None or isinstance(before, LowRank) or isinstance(after, LowRank):
        return after
    after = after or Unsent()
    after.restore(before.observe())
    return after


def _saves(codec: Codec, dtype: torch.dtype) -> bool:
    """Return whether the codec needs fewer bytes than the dtype. One 16-bit float type is therefore never converted to
    the other."""
    return dtype in FLOATS and codec.core.block_bytes < BLOCK * dtype.itemsize


__all__ = [
    "CODECS",
    "INT4",
    "INT8",
    "OF_MOMENTUM",
    "Codec",
    "Feedback",
    "Form",
    "LowRank",
    "Unsent",
    "carried",
    "forms",
]
