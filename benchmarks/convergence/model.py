"""The models that are trained: a CNN with BatchNorm, a multilayer perceptron, and a GPT of 0.8 million parameters."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.convergence.data import CONTEXT

LETTERS = 65


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, 2, 2, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )


class TransformerBlock(nn.Module):
    """Causal attention and a perceptron, each with a norm before it and a shortcut beside it (as in GPT-2)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output. x: tensor of (batch, letters, width)."""
        batch, letters, width = x.shape
        parts = self.attention(self.norms[0](x)).view(batch, letters, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).reshape(batch, letters, width))
        out: torch.Tensor = x + self.perceptron(self.norms[1](x))
        return out


class GPT(nn.Module):
    """Language model that maps letters to logits of the letters that follow."""

    def __init__(self, width: int = 128, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, LETTERS, bias=False)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.letters(letters) + self.places(torch.arange(letters.shape[1], device=letters.device))
        out: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return out
