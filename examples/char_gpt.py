"""A small GPT learns to write like Shakespeare, letter by letter.

python examples/char_gpt.py                  one process
dadt run -np 2 examples/char_gpt.py          two, with the same script
"""

import argparse
import gzip
import itertools
import math
import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    """Pieces of the text, and what follows each of their letters."""

    def __init__(self, letters, length):
        self.letters, self.length = letters, length

    def __len__(self):
        return (len(self.letters) - 1) // self.length

    def __getitem__(self, index):
        start = index * self.length
        return self.letters[start : start + self.length], self.letters[start + 1 : start + self.length + 1]


class Block(nn.Module):
    """Attention to what came before, and a perceptron; each beside a shortcut, behind a norm (as in GPT-2)."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.perceptron(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, letters, length, width, depth, heads=4):
        super().__init__()
        self.length = length
        self.letters = nn.Embedding(letters, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters, bias=False)

    def forward(self, x):
        """x: (batch, length) of letters. Returns logits (batch, length, letters) of those that follow."""
        x = self.letters(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def write(self, text, count):
        """text: (1, n). Goes on by `count` letters."""
        for _ in range(count):
            chances = self(text[:, -self.length :])[:, -1].softmax(-1)
            text = torch.cat([text, torch.multinomial(chances, 1)], 1)
        return text


@torch.no_grad()
def judge(model, loader, device):
    """Mean loss in nats per letter."""
    model.eval()
    losses = [F.cross_entropy(model(x.to(device)).flatten(0, 1), y.to(device).flatten()) for x, y in loader]
    model.train()
    return torch.stack(losses).mean().item()


def main():
    parser = argparse.ArgumentParser(description="Learn to write like Shakespeare.")
    default = Path(__file__).parent / "data" / "tinyshakespeare" / "input.txt.gz"
    parser.add_argument("--data", type=Path, default=default)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=64, help="letters that the model sees")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", default="char_gpt.pt", help="where the trained weights go")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    try:
        text = gzip.decompress(args.data.read_bytes()).decode()
    except OSError as error:
        sys.exit(f"no text in {args.data} ({error}): give the file with --data")
    alphabet = sorted(set(text))
    number = {letter: index for index, letter in enumerate(alphabet)}
    letters = torch.tensor([number[letter] for letter in text])
    part = len(letters) * 9 // 10
    train_loader = DataLoader(Windows(letters[:part], args.length), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(Windows(letters[part:], args.length), batch_size=256)

    model = GPT(len(alphabet), args.length, args.width, args.depth).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.1)
    rise = max(1, args.steps // 20)
    scheduler = LambdaLR(optimizer, lambda t: min((t + 1) / rise, 0.55 + 0.45 * math.cos(math.pi * t / args.steps)))

    batches = itertools.chain.from_iterable(itertools.repeat(train_loader))
    for step, (x, y) in zip(range(1, args.steps + 1), batches, strict=False):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(args.device)).flatten(0, 1), y.to(args.device).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 100 == 0:
            print(f"step {step}  loss {loss.item():.3f}")
    print(f"held out: loss {judge(model, test_loader, args.device):.3f} nats per letter")

    torch.save(model.state_dict(), args.save)
    model.eval()
    written = model.write(torch.tensor([[number["\n"]]], device=args.device), 200)
    print("".join(alphabet[index] for index in written[0]))


if __name__ == "__main__":
    main()
