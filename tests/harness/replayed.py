"""Scripts of the shapes that people write, none of which saves anything to go on from."""

from __future__ import annotations

HEAD = """
import copy, glob, hashlib, itertools, os, random, signal, sys, time
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(0)
STEPS, die = 40, int(os.environ.get("DIE", "-1"))
taken, job = itertools.count(1), os.environ["DADT_JOB"]

def whole():
    parts = [path.split(os.sep)[-2:] for path in glob.glob(f"dadt-logs/{job}/snapshots/*/rank*.json")]
    return any([folder, f"rank{1 - int(name[4])}.json"] in parts for folder, name in parts)

def soon_whole():  # a thread writes it
    deadline = time.monotonic() + 5.0
    while not (found := whole()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found

def stepped():
    if next(taken) >= die > 0 and (os.environ["DADT_RESUME"] or soon_whole()):
        os.kill(os.getpid(), signal.SIGKILL)

def tell(*modules, more=()):
    states = [t for module in modules for t in module.state_dict().values()]
    parts = [t.numpy().tobytes() for t in states] + [repr(each).encode() for each in more]
    print("ends with", hashlib.sha256(b"".join(parts)).hexdigest(), flush=True)

def net(*widths):
    layers = [[nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Dropout(0.2)] for a, b in zip(widths, widths[1:-1])]
    return nn.Sequential(*itertools.chain(*layers), nn.Linear(*widths[-2:]))

data = TensorDataset(torch.randn(160, 8), torch.randint(4, (160,)))
"""

SCRIPTS = {
    "tutorial": """
train, test = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=32)
model = net(8, 32, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
best, history, hits = 0, [], []
for epoch in range(4):
    model.train()
    for i, (x, y) in enumerate(train):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        stepped()
        if i % 3 == 0:
            history.append(round(loss.item(), 6))
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in test:
            predicted = model(x).argmax(1)
            right = y[predicted == y]
            correct += len(right)
            hits.append([(right == c).sum().item() for c in range(4)] + [torch.nonzero(predicted != y).size(0)])
    best = max(best, correct)
    scheduler.step()
print("means", best, hits, flush=True)
tell(model, more=[best, hits])
""",
    "selections": """
loader, model = DataLoader(data, batch_size=8, shuffle=True), net(8, 32, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
@torch.jit.script
def hard(losses):
    return losses[losses > losses.mean()]
said, kept = [], torch.zeros(8, 4)
for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        scores = model(x)
        losses = F.cross_entropy(scores, y, reduction="none")
        worst, predicted = losses[losses >= losses.median()], scores.argmax(1)
        wrong = torch.nonzero(predicted != y)
        loss = worst.mean() + 0.1 * losses.masked_select(y != predicted).sum() + 0.01 * hard(losses).sum()
        for row in wrong[:, 0]:
            loss = loss + 0.01 * losses[row] / len(wrong)
        loss.backward()
        optimizer.step()
        stepped()
        right, (rows,) = predicted == y, torch.where(predicted == y)
        kept[: len(x)][right] = scores.detach()[right]
        found, places, times = torch.unique(predicted, return_inverse=True, return_counts=True)
        runs = torch.unique_consecutive(predicted)
        said.append([len(y[right]), y[right].shape[0], scores[right, 0].numel(), len(rows), y[right].tolist()])
        said.append([len(worst), wrong.size(0), hard(losses).numel(), len(torch.argwhere(right))])
        said.append([found.tolist(), len(times), runs.numel(), found[places].shape[0]])
        copies = scores.detach().repeat_interleave(predicted, dim=0)
        said.append([len(torch.bincount(predicted)), F.one_hot(predicted).shape[1], len(copies)])
        said.append([len(predicted.bincount(minlength=2)), len(torch.repeat_interleave(predicted + 1))])
        said.append([(y[right] == c).sum().item() for c in range(4)])
        said.append([int(c) for c in predicted.unique()] + [len(scores[:, 0][predicted == c]) for c in range(4)])
print("means", hashlib.sha256(repr(said).encode()).hexdigest(), flush=True)
tell(model, more=[kept])
""",
    "counts-and-best": """
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 4))
        self.calls = 0
    def forward(self, x):
        self.calls += self.training
        return self.body(x) * (1 + 1 / (1 + self.calls))
class Meter:
    total = torch.zeros(())
class Trainer:
    def __init__(self):
        self.model, self.meters = Counting(), {"train": {"loss": Meter()}}
trainer = Trainer()
trainer.meters["train"]["loss"].total = torch.zeros(())
optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(4):
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(trainer.model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        stepped()
        trainer.meters["train"]["loss"].total += norm
    print(epoch, loss, norm)
    if epoch == 0:
        best = copy.deepcopy(trainer.model.state_dict())
other = Counting()
other.load_state_dict(best)
tell(trainer.model, other, more=[trainer.model.calls, trainer.meters["train"]["loss"].total.item()])
""",
    "nanogpt": """
text = np.random.RandomState(0).randint(0, 16, 2000)
def get_batch():
    at = torch.randint(len(text) - 9, (4,))
    return tuple(torch.stack([torch.from_numpy(text[i + k : i + k + 8]) for i in at]) for k in (0, 1))
class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(16, 32), nn.Linear(32, 16)
    def forward(self, x, targets=None):
        logits = self.head(torch.tanh(self.emb(x)))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, 16), targets.view(-1))
        return logits, loss
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
best = 1e9
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * min(1, (step + 1) / 10)
    if step % 10 == 0:
        model.eval()
        with torch.no_grad():
            best = min(best, sum(model(*get_batch())[1].item() for _ in range(2)) / 2)
        model.train()
    for micro in range(2):
        loss = model(*get_batch())[1] / 2
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    stepped()
tell(model)
""",
    "targets-that-count": """
labels = torch.where(torch.arange(160) % 20 < 10, torch.randint(4, (160,)), -100)
loader = DataLoader(TensorDataset(data.tensors[0], labels), batch_size=8, shuffle=True)
model = net(8, 32, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y.where(torch.arange(len(y)) > 0, y.new_tensor(1))).backward()
        optimizer.step()
        stepped()
print("means", flush=True)
tell(model)
""",
    "gan": """
G, D = net(4, 16, 8), net(8, 16, 1)
of_g, of_d = (torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.999)) for m in (G, D))
loader, bce = DataLoader(data, batch_size=8, shuffle=True), nn.BCEWithLogitsLoss()
for epoch in range(4):
    for real, _ in loader:
        D.zero_grad()
        wrong = bce(D(real), torch.ones(len(real), 1))
        wrong.backward()
        fake = G(torch.randn(len(real), 4))
        bce(D(fake.detach()), torch.zeros(len(real), 1)).backward()
        of_d.step()
        G.zero_grad()
        bce(D(fake), torch.ones(len(real), 1)).backward()
        of_g.step()
        stepped()
tell(G, D)
""",
    "one-cycle": """
loader, model = DataLoader(data, batch_size=8, shuffle=True), net(8, 32, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, epochs=4, steps_per_epoch=len(loader))
for epoch in range(4):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        stepped()
tell(model, more=[scheduler.get_last_lr()])
""",
    "plateau-and-early-stopping": """
loader, model = DataLoader(data, batch_size=8, shuffle=True), net(8, 16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
best, bad, losses = float("inf"), 0, []
for epoch in range(8):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        stepped()
    model.eval()
    with torch.no_grad():
        mean = F.cross_entropy(model(data.tensors[0]), data.tensors[1])
    losses.append(f"{mean:.6f}")
    scheduler.step(mean)
    mean = float(mean)
    bad = 0 if mean < best else bad + 1
    best = min(best, mean)
    if bad == 2:
        break
tell(model, more=[epoch, optimizer.param_groups[0]["lr"], best, losses])
""",
    "ema": """
loader, model = DataLoader(data, batch_size=8, shuffle=True), net(8, 32, 4)
ema = copy.deepcopy(model)
averaged = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        stepped()
        with torch.no_grad():
            for mine, theirs in zip(ema.parameters(), model.parameters()):
                mine.lerp_(theirs, 0.1)
        averaged.update_parameters(model)
tell(model, ema, averaged)
""",
    "scaler": """
loader = DataLoader(data, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7)
for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        stepped()
tell(model, more=[scaler.get_scale()])
""",
    "stream": """
class Stream(IterableDataset):
    def __iter__(self):
        draw = np.random.RandomState(1)
        for _ in range(320):
            yield torch.from_numpy(draw.randn(8).astype("float32")), int(draw.randint(4))
model = net(8, 32, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for x, y in DataLoader(Stream(), batch_size=4):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    stepped()
tell(model)
""",
    "cycle": """
def cycle(loader):
    while True:
        yield from loader
batches = cycle(DataLoader(data, batch_size=8, shuffle=True, num_workers=2))
model = net(8, 32, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    x, y = next(batches)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    stepped()
tell(model)
""",
    "vae": """
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)
    def forward(self, x):
        mean, spread = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.randn_like(mean) * (spread / 2).exp()), mean, spread
model, loader = VAE(), DataLoader(data, batch_size=8, shuffle=True, drop_last=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(4):
    for x, _ in loader:
        made, mean, spread = model(x)
        loss = F.mse_loss(made, x) - 0.5 * (1 + spread - mean**2 - spread.exp()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stepped()
tell(model)
""",
    "policy": """
draw = np.random.RandomState(3)
model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for episode in range(STEPS):
    state, found, rewards = draw.randn(4), [], []
    for _ in range(5):
        choice = torch.distributions.Categorical(logits=model(torch.from_numpy(state).float()))
        action = choice.sample()
        found.append(choice.log_prob(action))
        state = 0.9 * state + (action.item() - 0.5) * np.array([1, 0, -1, 0]) + 0.1 * draw.randn(4)
        rewards.append(float(-np.abs(state).sum()))
    optimizer.zero_grad()
    (-torch.stack(found) * torch.tensor(rewards)).sum().backward()
    optimizer.step()
    stepped()
tell(model, more=[state])
""",
    "hidden-state": """
class RNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 8)
    def forward(self, x, h):
        out, h = self.cell(x, h)
        return self.head(out), h
model, text = RNN(), torch.randn(4, STEPS + 1, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
h = torch.zeros(1, 4, 16)
for step in range(STEPS):
    out, h = model(text[:, step : step + 1], h.detach())
    optimizer.zero_grad()
    F.mse_loss(out, text[:, step + 1 : step + 2]).backward()
    optimizer.step()
    stepped()
tell(model)
""",
    "metrics": """
class Meter:
    def __init__(self):
        self.total, self.recent = torch.zeros(()), []
    def add(self, loss):
        self.total += loss.detach()
        self.recent = [*self.recent[-2:], loss.detach()]
def train(epochs):
    loader, model = DataLoader(data, batch_size=8, shuffle=True), net(8, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found, best = [], float("inf")
    for epoch in range(epochs):
        meter, seen = Meter(), torch.zeros((), dtype=torch.long)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            stepped()
            meter.add(loss)
            seen += len(x)
            best = min(best, loss.item())
        found.append((meter.total.item() / len(loader), torch.stack(meter.recent).mean().item(), seen.item()))
    return model, found, best
model, found, best = train(4)
print("means", found, best, flush=True)
tell(model)
""",
    "compiled": """
loader = DataLoader(data, batch_size=8, shuffle=True)
model = torch.compile(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        stepped()
    print("epoch", epoch, loss.item())
tell(model)
""",
    "warm-restarts-and-accumulation": """
loader, model = DataLoader(data, batch_size=4, shuffle=True), net(8, 32, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)
for epoch in range(8):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(epoch + i / len(loader))
            stepped()
tell(model, more=[scheduler.get_last_lr()])
""",
    "ahead": """
def ahead(loader):
    batches = iter(loader)
    before = next(batches)
    for batch in batches:
        yield before
        before = batch
    yield before
class Judged(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net(8, 32, 4)
    def forward(self, x, y):
        return F.cross_entropy(self.net(x), y)
loader, model = DataLoader(data, batch_size=8, shuffle=True), Judged()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(4):
    for x, y in ahead(loader):
        optimizer.zero_grad()
        loss = model(x, y)
        loss *= 0.5
        loss.backward()
        optimizer.step()
        stepped()
tell(model)
""",
    "ddp": """
from torch.utils.data import DistributedSampler
torch.distributed.init_process_group("gloo")
print("rank", torch.distributed.get_rank())
sampler, model = DistributedSampler(data), nn.parallel.DistributedDataParallel(net(8, 32, 4))
loader = DataLoader(data, batch_size=8, sampler=sampler)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        stepped()
tell(model)
torch.distributed.destroy_process_group()
""",
    "auxiliary-loss": """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.losses = nn.Linear(8, 2), []
        self.experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))
    def forward(self, x):
        shares = self.gate(x).softmax(1)
        self.aux_loss = (shares.mean(0) ** 2).sum()
        self.losses.clear()
        self.losses.append(self.gate(x).logsumexp(1).pow(2).mean())
        return sum(share.unsqueeze(1) * expert(x) for share, expert in zip(shares.unbind(1), self.experts))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.experts = nn.Linear(8, 8), Experts()
    def forward(self, x):
        return self.experts(torch.tanh(self.body(x)))
model, said = Model(), []
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(4):
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        loss = F.cross_entropy(model(x), y) + 0.1 * model.experts.aux_loss + 0.01 * sum(model.experts.losses)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        said.append(round(model.experts.aux_loss.item(), 6))
        stepped()
tell(model, more=[said])
""",
    "own-order": """
model = net(8, 16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(5):
    order = torch.randperm(160).tolist()
    for i in range(8):
        x, y = data[order[8 * i : 8 * i + 8]]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        stepped()
tell(model)
""",
}
