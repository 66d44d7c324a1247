"""A training in which ranks end before, within or after each kind of call that reads state or waits for others."""

from __future__ import annotations

SCRIPT = r"""
import contextlib, ctypes, hashlib, io, os, re, signal, sys, time, torch
from torch import nn
from torch.optim.swa_utils import update_bn
from dadt.inject import worker

torch.set_num_threads(1)
environment = open("/proc/self/environ").read()  # a script that is seen to ask for its rank writes on every rank
rank, np = (int(re.search(name, environment)[1]) for name in ("DADT_RANK=([0-9]+)", "DADT_WORLD_SIZE=([0-9]+)"))
faults = [fault.split(":") for fault in sys.argv[1].split(",") if fault]  # call:moment:rank
libc = ctypes.CDLL(None)

def mark(name):
    libc.mkdir(f"{name} {rank}".encode(), 0o777)  # what Python writes here stays apart

def others(lost):
    "Ranks that are left beside one. With `local` this rank may not have entered their newest generation yet."
    ranks = worker.runtime.ranks
    return [each for each in ranks.deaths._newest.members or ranks.members if each != lost]

def marked(name, ranks):
    return all(os.path.exists(f"{name} {each}") for each in ranks)

def until(true):
    while not true():
        time.sleep(0.005)

def told(lost):
    return lost not in worker.runtime.ranks.members or worker.runtime.ranks.deaths.outdated

class Waits:
    "Saved, it waits for the end of a rank."
    def __init__(self, lost):
        self.lost = lost
    def __reduce__(self):
        mark("within")
        until(lambda: told(self.lost))
        return str, ("saved",)

def around(name, call):
    moments = {moment: int(lost) for what, moment, lost in faults if what == name}
    if not moments:
        return call(None)
    ((moment, lost),) = moments.items()
    if rank == lost:
        if moment == "after":
            call(None)
            until(lambda: marked(name, others(lost)))
        if moment == "within":
            until(lambda: os.path.exists(f"within {others(lost)[0]}"))
        os.kill(os.getpid(), signal.SIGKILL)
    if moment == "told":
        until(lambda: told(lost))
    call(lost if moment == "within" else None)
    mark(name)
    if moment == "after":
        until(lambda: told(lost))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
late = nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
data = torch.utils.data.TensorDataset(torch.randn(8 * np * 2, 8))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)

def save(lost):
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "waits": lost and Waits(lost)}
    torch.save(content, "model.pt")

def state_of_one(lost):
    if rank == worker.runtime.ranks.members[0]:
        optimizer.state_dict()

def evaluate(lost):
    model.eval()
    with torch.no_grad():
        model(torch.randn(16, 8))
    model.train()

def loads(lost):
    content = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, content)
    content.seek(0)
    content = torch.load(content)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])

def added(lost):
    optimizer.add_param_group({"params": late.parameters()})

def statistics(lost):
    update_bn([torch.randn(16, 8)], model)

def passes(lost):
    for (x,) in loader:
        step(x, iter(()))

def reads(lost):
    [p.grad.norm().item() for p in model.parameters()]

BETWEEN = {
    "state": lambda lost: optimizer.state_dict(), "one's": state_of_one, "save": save,
    "model": lambda lost: model.state_dict(), "load": loads, "eval": evaluate, "statistics": statistics,
    "added": added, "pass": passes,
    "scheduler": lambda lost: scheduler.step(), "zero": lambda lost: optimizer.zero_grad(),
    "loss": lambda lost: float(loss),
}
WITHIN = {
    "clip": lambda lost: nn.utils.clip_grad_norm_(model.parameters(), 1.0), "gradients": reads,
    "in the step": lambda lost: optimizer.state_dict(), "saved in the step": save,
}
uses = False

def step(x, calls):
    global loss, uses
    optimizer.zero_grad()
    y = model(x)
    loss = (late(y) if uses else y).pow(2).mean()
    loss.backward()
    for name in calls:
        around(name, WITHIN[name])
    optimizer.step()

order = [name for name in [*BETWEEN, *WITHIN] if name != "added"] + ["added"]
for number in range(3 * len(order) + 6):
    name = order[number // 3 - 1] if number % 3 == 0 and 0 < number // 3 <= len(order) else ""
    step(torch.randn(16, 8), [name] if name in WITHIN else [])
    if name in BETWEEN:
        around(name, BETWEEN[name])
        uses = uses or name == "added"
around("end", lambda lost: None)
parts = [*model.state_dict().values(), *late.state_dict().values()]
print("ends with", hashlib.sha256(b"".join(t.numpy().tobytes() for t in parts)).hexdigest(), flush=True)
"""
CALLS = (
    "state", "one's", "save", "model", "load", "eval", "statistics", "pass", "scheduler", "zero", "loss", "clip",
    "gradients", "in the step", "saved in the step", "added", "end",
)  # fmt: skip
"""In the order in which they come."""
MOMENTS = ("before", "told", "after")
"""The lost rank ends before its call; others make theirs once they are told of it; it ends after all have made theirs.
"within", with a save: while another rank is in it."""
