"""Who speaks these lines of Shakespeare? A BERT encoder learns it, and is judged by speeches that it has not seen.

python examples/bert_classify.py                  one process
dadt run -np 2 examples/bert_classify.py          two, with the same script
"""

import argparse
import gzip
import random
import re
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

PAD, UNKNOWN, MASK = range(3)


class Block(nn.Module):
    """Attention to all words and a perceptron, each beside a shortcut and followed by a norm."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, there):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=there[:, None, None, :])
        y = self.projection(y.transpose(1, 2).reshape(batch, length, width))
        x = self.norm1(x + self.dropout(y))
        return self.norm2(x + self.dropout(self.perceptron(x)))


class Speaker(nn.Module):
    """A BERT encoder, and on the mean over all words a layer that says who speaks."""

    def __init__(self, words, length, speakers, width=64, heads=4, depth=2, dropout=0.1):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        nn.init.normal_(self.words.weight, std=0.1)
        nn.init.normal_(self.places.weight, std=0.02)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, speakers))

    def forward(self, numbers):
        """numbers: (batch, length) of words. Returns logits (batch, speakers)."""
        there = numbers != PAD
        x = self.words(numbers) + self.places(torch.arange(numbers.shape[1], device=numbers.device))
        x = self.dropout(self.norm(x))
        for block in self.blocks:
            x = block(x, there)
        mean = (x * there[..., None]).sum(1) / there.sum(1, keepdim=True)
        return self.head(mean)


def read(path, count):
    """The `count` speakers who say most, and their speeches: [(number of the speaker, words)]."""
    text = gzip.decompress(path.read_bytes()).decode()
    parts = [part.partition(":\n") for part in text.split("\n\n")]
    speeches = [(name, re.findall(r"[a-z']+|[.,;:!?]", said.lower())) for name, _, said in parts]
    total = Counter()
    for name, words in speeches:
        total[name] += len(words)
    names = [name for name, _ in total.most_common(count)]
    return names, [(names.index(name), words) for name, words in speeches if name in names]


def encode(speeches, vocabulary, length):
    """Pieces of at most `length` words, as numbers, and who says each."""
    x, y = [], []
    for speaker, words in speeches:
        numbers = [vocabulary.get(word, UNKNOWN) for word in words]
        for i in range(0, len(numbers), length):
            piece = numbers[i : i + length]
            x.append(piece + [PAD] * (length - len(piece)))
            y.append(speaker)
    return TensorDataset(torch.tensor(x), torch.tensor(y))


def hide(x, share):
    """Some words are hidden in training, so that no single one gives the speaker away."""
    return torch.where((torch.rand(x.shape, device=x.device) < share) & (x != PAD), MASK, x)


def main():
    parser = argparse.ArgumentParser(description="Learn who speaks these lines of Shakespeare.")
    default = Path(__file__).parent / "data" / "tinyshakespeare" / "input.txt.gz"
    parser.add_argument("--data", type=Path, default=default)
    parser.add_argument("--speakers", type=int, default=4, help="how many, of those who say most")
    parser.add_argument("--length", type=int, default=64, help="words in a piece of a speech")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    try:
        names, speeches = read(args.data, args.speakers)
    except OSError as error:
        sys.exit(f"no plays in {args.data} ({error}): give the file with --data")
    random.Random(args.seed).shuffle(speeches)
    part = len(speeches) * 4 // 5
    count = Counter(word for _, words in speeches[:part] for word in words)
    vocabulary = {word: number for number, word in enumerate(sorted(w for w in count if count[w] > 2), start=MASK + 1)}
    train, test = (encode(some, vocabulary, args.length) for some in (speeches[:part], speeches[part:]))
    train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test, batch_size=256)
    print(f"{', '.join(names)}: {len(train)} pieces to learn from, {len(test)} held out, {len(vocabulary)} words")

    model = Speaker(MASK + 1 + len(vocabulary), args.length, len(names)).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = OneCycleLR(optimizer, args.lr, epochs=args.epochs, steps_per_epoch=len(train_loader), pct_start=0.1)
    for epoch in range(1, args.epochs + 1):
        model.train()
        total = 0.0
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(hide(x.to(args.device), 0.15)), y.to(args.device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.item()
        model.eval()
        with torch.no_grad():
            right = sum((model(x.to(args.device)).argmax(1).cpu() == y).sum().item() for x, y in test_loader)
        print(f"epoch {epoch}  loss {total / len(train_loader):.3f}  accuracy {right / len(test):.3f}")

    most = torch.bincount(test.tensors[1]).max().item()
    print(f"held out: accuracy {right / len(test):.3f}, always the most frequent speaker {most / len(test):.3f}")


if __name__ == "__main__":
    main()
