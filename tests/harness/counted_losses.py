"""Trains small models whose losses are means over what counts, of which ranks have unequal numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WORDS, LENGTH, SAMPLES, BATCH, PASSES = 9, 8, 43, 8, 3
"""The last batch has three samples, all of them one rank's."""
IGNORED = -100


def _padded() -> Tensor:
    tokens = torch.randint(1, WORDS, (SAMPLES, LENGTH))
    for row, length in zip(tokens, torch.randint(2, LENGTH + 1, (SAMPLES,)), strict=True):
        row[length:] = 0
    return tokens


def _next_tokens(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return tokens[:, :-1], labels[:, 1:]


def padding() -> tuple[Tensor, Tensor]:
    """Sequences of several lengths, in a language model."""
    tokens = _padded()
    return _next_tokens(tokens, tokens.masked_fill(tokens == 0, IGNORED))


def masked() -> tuple[Tensor, Tensor]:
    """Some tokens of padded sequences are hidden, and only they count, as in BERT's training."""
    tokens = _padded()
    hidden = (torch.rand(tokens.shape) < 0.3) & (tokens != 0)
    hidden[:, 0] = True  # a sequence has one at least, so that no rank is without
    return tokens.masked_fill(hidden, 1), tokens.masked_fill(~hidden, IGNORED)


def packed() -> tuple[Tensor, Tensor]:
    """Rows of several documents each, where the first token of a document is not to be foretold from the one before."""
    tokens = torch.randint(1, WORDS, (SAMPLES, LENGTH))
    return _next_tokens(tokens, tokens.masked_fill(torch.rand(tokens.shape) < 0.3, IGNORED))


def completion() -> tuple[Tensor, Tensor]:
    """Prompts do not count, as in a supervised fine-tuning on completions alone."""
    tokens = _padded()
    prompts = torch.arange(LENGTH)[None] < torch.randint(1, 4, (SAMPLES, 1))
    prompts[:, 1] = False
    return _next_tokens(tokens, tokens.masked_fill(prompts | (tokens == 0), IGNORED))


def even() -> tuple[Tensor, Tensor]:
    """All targets count, in sequences of one length."""
    tokens = torch.randint(1, WORDS, (SAMPLES, LENGTH))
    return _next_tokens(tokens, tokens)


def mean(logits: Tensor, labels: Tensor, **how: float) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, **how)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return mean(logits, labels, label_smoothing=0.1)


def by_class(logits: Tensor, labels: Tensor) -> Tensor:
    weights = torch.arange(1, WORDS + 1, dtype=torch.float32)
    return nn.CrossEntropyLoss(weight=weights, ignore_index=IGNORED)(logits.flatten(0, 1), labels.flatten())


def likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(logits.log_softmax(-1).transpose(1, 2), labels, ignore_index=IGNORED)


def binary(logits: Tensor, labels: Tensor) -> Tensor:
    counts = labels != IGNORED
    wanted, weights = F.one_hot(labels[counts], WORDS).float(), torch.arange(1, WORDS + 1, dtype=torch.float32)
    return F.binary_cross_entropy_with_logits(logits[counts], wanted, weight=weights)


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def auxiliary(logits: Tensor, labels: Tensor) -> Tensor:
    return mean(logits, labels) + 0.1 * logits.square().mean()


def _batches(loader: DataLoader[tuple[Tensor, ...]], count: int) -> Iterator[list[list[Tensor]]]:
    passing = iter(loader)
    while batches := list(islice(passing, count)):
        yield batches


def train(
    data: Callable[[], tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor] = mean,
    accumulate: int = 1,
    *,
    by_items: bool = False,
    drop_last: bool = False,
) -> dict[str, Tensor]:
    """Return the weights after a few passes. accumulate: backwards in a step. by_items: whether each loss is a sum that
    is divided by what the whole step counts, as Hugging Face's is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    loader = DataLoader(TensorDataset(*data()), BATCH, shuffle=True, drop_last=drop_last)
    for _ in range(PASSES):
        for batches in _batches(loader, accumulate):
            items = sum(int((labels != IGNORED).sum()) for _, labels in batches)
            for tokens, labels in batches:
                logits = model(tokens)
                if by_items:
                    found = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / items
                else:
                    found = loss(logits, labels) / len(batches)
                found.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


EXACT: dict[str, Callable[[], dict[str, Tensor]]] = {
    "padding": lambda: train(padding),
    "masked": lambda: train(masked),
    "packed": lambda: train(packed),
    "completion": lambda: train(completion),
    "smoothed": lambda: train(padding, smoothed),
    "class weights": lambda: train(even, by_class),
    "likelihood": lambda: train(packed, likelihood),
    "binary": lambda: train(padding, binary),
    "accumulated": lambda: train(padding, accumulate=2),
    "accumulated in threes": lambda: train(masked, by_class, accumulate=3),
    "items": lambda: train(completion, by_items=True),
    "items, accumulated": lambda: train(completion, accumulate=2, by_items=True, drop_last=True),
}
"""Trainings that are to equal one process on the joint batch."""
AS_BEFORE: dict[str, Callable[[], dict[str, Tensor]]] = {
    "even": lambda: train(even),
    "even, accumulated": lambda: train(even, accumulate=2),
    "focal": lambda: train(padding, focal),
    "auxiliary": lambda: train(padding, auxiliary),
}
"""Trainings whose ranks are weighed by samples."""
