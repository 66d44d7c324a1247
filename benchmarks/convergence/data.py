"""The training data: 10,000 handwritten digits, and 1.1 MB of Shakespeare as single letters."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path

import torch
from torch.utils.data import Dataset, TensorDataset

FOLDER = Path(__file__).parents[2] / "examples" / "data"
CONTEXT = 64
"""Number of letters that the language models see at a time."""

Pairs = Dataset[tuple[torch.Tensor, ...]]


@cache
def digits(name: str) -> Pairs:
    """Return images of 1x28x28, with mean 0 and deviation 1, and labels. name: `train` (8,000) or `t10k` (2,000)."""
    folder = FOLDER / "mnist"
    images = gzip.decompress((folder / f"{name}-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((folder / f"{name}-labels-idx1-ubyte.gz").read_bytes())[8:]
    x = torch.frombuffer(bytearray(images), dtype=torch.uint8).view(-1, 1, 28, 28).float() / 255
    return TensorDataset((x - 0.1307) / 0.3081, torch.frombuffer(bytearray(labels), dtype=torch.uint8).long())


class Letters(Pairs):
    """Windows of CONTEXT letters as numbers, each with the letters that follow."""

    def __init__(self, text: torch.Tensor, stride: int) -> None:
        self.text = text
        self.stride = stride

    def __len__(self) -> int:
        return (len(self.text) - 1 - CONTEXT) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        window = self.text[index * self.stride : index * self.stride + CONTEXT + 1]
        return window[:-1], window[1:]


@cache
def shakespeare() -> tuple[Pairs, Pairs]:
    """Return Shakespeare's text as training data, its first nine tenths in overlapping windows, and as validation data,
    the rest in windows that do not overlap."""
    text = gzip.decompress((FOLDER / "tinyshakespeare" / "input.txt.gz").read_bytes())
    numbers = {letter: i for i, letter in enumerate(sorted(set(text)))}
    coded = torch.tensor([numbers[letter] for letter in text])
    cut = len(coded) * 9 // 10
    return Letters(coded[:cut], 1), Letters(coded[cut:], CONTEXT)
