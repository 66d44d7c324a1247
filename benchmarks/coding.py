"""Measures the processor time of compressing gradients with error feedback and of decompressing them, as multiples of
a memcpy of the same gradients. Run: python -m benchmarks.coding"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.page import table
from dadt import _core
from dadt.comm.compression import CODECS, OF_MOMENTUM
from dadt.comm.compression.base import BLOCK


def seconds(work: Callable[[], object]) -> float:
    """Return the processor seconds of this thread for the work."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def shares(codec: _core.Codec, wire: torch.Tensor, count: int, rounds: int) -> list[float]:
    """Return the medians over rounds of compressing `count` values and of decompressing them, and of their sum, as
    multiples of a copy. wire: memory for the compressed values."""
    gradients, other, owed = torch.randn(count), torch.empty(count), torch.zeros(count)
    copy = partial(other.copy_, gradients)
    there = partial(_core.compress, codec, gradients.data_ptr(), count, wire.data_ptr(), owed.data_ptr())
    back = partial(_core.decompress, codec, wire.data_ptr(), other.data_ptr(), count)
    turns = [(seconds(copy), seconds(there), seconds(back)) for _ in range(rounds + 1)][1:]
    parts = [(one / base, two / base, (one + two) / base) for base, one, two in turns]
    return [statistics.median(column) for column in zip(*parts, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coding", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100, help="of float32")
    parser.add_argument("--rounds", type=int, default=15, help="each of all in turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    count = (options.megabytes << 20) // 4
    lines = []
    for name, codec in {**CODECS, **OF_MOMENTUM}.items():
        wire = torch.empty(-(-count // BLOCK) * codec.core.block_bytes, dtype=torch.uint8)
        lines.append([name, *(f"{share:.2f}" for share in shares(codec.core, wire, count, options.rounds))])
    print(table(["", "compress", "decompress", "both"], lines))


if __name__ == "__main__":
    main()
