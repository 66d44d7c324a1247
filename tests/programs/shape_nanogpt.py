"""The loop of nanoGPT's train.py: batches drawn by hand, accumulation, a rate set by hand, one checkpoint."""

import math

import torch
from shared import tell

torch.manual_seed(1337)
text = (torch.arange(4096) * 3 + torch.arange(4096) // 7) % 32


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 16)
        self.block = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(16, 32, bias=False)

    def forward(self, words, targets):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(words.size(1))
        logits = self.head(self.block(self.embedding(words), src_mask=mask, is_causal=True))
        return torch.nn.functional.cross_entropy(logits.view(-1, 32), targets.reshape(-1))


def get_batch(generator=None):
    starts = torch.randint(len(text) - 17, (8,), generator=generator)
    words = torch.stack([text[start : start + 17] for start in starts])
    return words[:, :-1], words[:, 1:]


@torch.no_grad()
def estimate_loss():
    model.eval()
    generator = torch.Generator().manual_seed(1)
    found = [float(model(*get_batch(generator))) for _ in range(8)]
    model.train()
    return sum(found) / len(found)


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
before, best = estimate_loss(), math.inf
words, targets = get_batch()
for iteration in range(120):
    for group in optimizer.param_groups:
        group["lr"] = 3e-3 * min(1.0, (iteration + 1) / 10)
    if iteration % 40 == 39 and (loss := estimate_loss()) < best:
        best = loss
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "best": best}, "ckpt.pt")
    for _ in range(2):
        (model(words, targets) / 2).backward()
        words, targets = get_batch()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
assert torch.load("ckpt.pt")["best"] == best
tell(model, before, estimate_loss())
