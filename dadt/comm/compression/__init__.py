"""How a block of values travels in fewer bytes. Each way is one file and one line here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dadt.comm.bucket import Bucket
from dadt.comm.compression.base import BLOCK, FLOATS, Codec
from dadt.comm.compression.feedback import Feedback
from dadt.comm.compression.half import BFLOAT16, FLOAT16
from dadt.comm.compression.int8 import Int8
from dadt.comm.compression.powersgd import LowRank

CODECS: dict[str, Codec] = {"bf16": BFLOAT16, "fp16": FLOAT16, "int8": Int8()}

Form = Feedback | LowRank
"""State of one bucket that the exchanges before have left."""


def forms(name: str, buckets: Sequence[Bucket]) -> list[Form | None]:
    """The state for each bucket; None if it travels as it is. name: as given to --compression."""
    family, _, rank = name.partition(":")
    if family == "powersgd":
        made = [LowRank(b, int(rank)) if b.dtype in FLOATS else None for b in buckets]
        return [form if form is not None and form.matrices else None for form in made]
    codec = CODECS.get(name)
    return [Feedback(codec) if codec and _saves(codec, b.dtype) else None for b in buckets]


def _saves(codec: Codec, dtype: torch.dtype) -> bool:
    """Fewer bytes. Floats of 16 bits are not made others of 16 bits."""
    return dtype in FLOATS and codec.core.block_bytes < BLOCK * dtype.itemsize


__all__ = ["CODECS", "Codec", "Feedback", "Form", "LowRank", "forms"]
