"""The language models BERT (arXiv:1810.04805) and GPT-2, in the sizes of their first publication."""

from __future__ import annotations

import torch
from torch import nn

from dadt_cli.bench.models.workload import OURS, Workload, installed, tokens

WIDTH, HEADS, DEPTH = 768, 12, 12
SMALL = {"vocabulary": 4096, "places": 64, "width": 320, "heads": 5, "depth": 6}
"""The sizes of the GPT that `dadt bench fsdp` trains."""
MASK, MASKED = 103, 0.15
"""The token that replaces masked tokens, and the share of tokens that are masked."""
IGNORED = -100


def bert_base() -> Workload:
    """Return BERT base with 109.5 million parameters, which predicts masked tokens in sequences of 128 tokens."""
    found, source = installed("transformers", lambda library: library.BertForMaskedLM(library.BertConfig()))
    return tokens(Bert() if found is None else found, source, hidden, length=128, vocabulary=30522)


def gpt2_small() -> Workload:
    """Return GPT-2 small with 124.4 million parameters, which predicts the next token in sequences of 256 tokens."""
    found, source = installed("transformers", lambda library: library.GPT2LMHeadModel(library.GPT2Config()))
    return tokens(Gpt() if found is None else found, source, following, length=256, vocabulary=50257)


def sharded_gpt() -> Workload:
    """Return a GPT with 8.7 million parameters, which predicts the next token in sequences of 64 tokens and gathers
    the parts of one block at a time."""
    gpt = Gpt(**SMALL)
    made = tokens(gpt, OURS, following, length=64, vocabulary=SMALL["vocabulary"])
    return made._replace(shards=tuple(gpt.blocks.layers))


class Bert(nn.Module):
    """BERT: maps tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, vocabulary: int = 30522, places: int = 512) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.places = nn.Embedding(places, WIDTH)
        self.segments = nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.TransformerEncoder(
            block(norm_first=False, width=WIDTH, heads=HEADS), DEPTH, enable_nested_tensor=False
        )
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        self.output = nn.Linear(WIDTH, vocabulary)
        self.output.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places) + self.segments(torch.zeros_like(tokens))
        logits: torch.Tensor = self.output(self.head(self.blocks(self.dropout(self.norm(x)))))
        return logits


class Gpt(nn.Module):
    """GPT-2: maps tokens (batch, length) to logits (batch, length, vocabulary), each computed only from preceding
    tokens."""

    def __init__(
        self, vocabulary: int = 50257, places: int = 1024, width: int = 0, heads: int = 0, depth: int = 0
    ) -> None:
        super().__init__()
        width, heads, depth = width or WIDTH, heads or HEADS, depth or DEPTH
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(places, width)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.TransformerEncoder(
            block(norm_first=True, width=width, heads=heads), depth, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.dropout(self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device)))
        later = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        logits: torch.Tensor = self.output(self.blocks(x, later, is_causal=True))
        return logits


def block(norm_first: bool, width: int, heads: int) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=norm_first
    )


def hidden(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mask random tokens and return the loss of the model's predictions of them, as in the training of BERT."""
    chosen = torch.rand(tokens.shape, device=tokens.device) < MASKED
    chosen[:, 0] = True  # masked in any case, since random choice may mask none of a few tokens
    logits = logits_of(model, tokens.masked_fill(chosen, MASK))
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens.masked_fill(~chosen, IGNORED).flatten(), ignore_index=IGNORED
    )


def following(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss of predicting each token from the tokens before it."""
    return nn.functional.cross_entropy(logits_of(model, tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def logits_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    made = model(tokens)
    # Models of the transformers library return an object that contains the logits.
    logits: torch.Tensor = made if isinstance(made, torch.Tensor) else made.logits
    return logits
