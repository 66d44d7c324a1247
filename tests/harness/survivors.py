"""A training in which ranks meet with faults, and the weights of those that come to its end."""

from __future__ import annotations

from collections.abc import Callable

from harness.run import Result

TRAIN = """
import hashlib, os, re, signal, sys, time, torch
torch.set_num_threads(1)
torch.manual_seed(0)
environment = open("/proc/self/environ").read()  # a script that is seen to ask for its rank writes on every rank
rank, np = (int(re.search(name, environment)[1]) for name in ("DADT_RANK=([0-9]+)", "DADT_WORLD_SIZE=([0-9]+)"))
faults = [fault.split(":") for fault in sys.argv[1].split(",") if fault]
steps = 60

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def comes(step, where):
    if [str(rank), str(step), where] in faults:
        die()

class Here(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        comes(step, "backward")
        return gradient

def net(*widths):
    layers = [torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.BatchNorm1d(b)) for a, b in zip(widths, widths[1:])]
    return torch.nn.Sequential(*layers)

step = 0
comes(0, "start")
model, other = net(16, 32, 4), net(4, 8, 16)
optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, other)]
data = torch.utils.data.TensorDataset(torch.randn(2 * np * steps, 16), torch.randint(4, (2 * np * steps,)))
for x, y in torch.utils.data.DataLoader(data, batch_size=2, shuffle=True, num_workers=WORKERS):
    comes(step, "forward")
    optimizers[0].zero_grad()
    predicted = model(Here.apply(x.requires_grad_()))
    torch.nn.functional.cross_entropy(predicted, y).backward()
    comes(step, "exchange")
    optimizers[0].step()
    if TWO:
        optimizers[1].zero_grad()
        (other(predicted.detach()) - x.detach()).pow(2).mean().backward()
        optimizers[1].step()
    step += 1
assert step == steps, step
comes(step, "end")
weights = b"".join(t.numpy().tobytes() for t in [*model.state_dict().values(), *other.state_dict().values()])
torch.save(model.state_dict(), "model.pt")
with open("log.txt", "a") as file:
    file.write(f"written by {rank}\\n")
print("ends with", hashlib.sha256(weights).hexdigest(), flush=True)
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
LACKS = """
import subprocess
from dadt.inject import worker
from dadt.errors import PeerLost

def wait(work, ordinary=worker.runtime.ranks.wait):
    ordinary(work)
    if rank == 1 and step == LATE and "WHAT" in work.name:
        subprocess.run(["touch", "delivered"], check=True)  # what Python writes here stays apart
        while not worker.runtime.ranks.deaths.outdated:
            time.sleep(0.01)
        raise PeerLost("told before it was done")
worker.runtime.ranks.wait = wait
"""
"""Rank 1 hears of a loss when the others have had an average already, and it has not."""
KILL_ONCE_DELIVERED = f"""
while not os.path.exists("delivered"):
    time.sleep(0.01)
{KILL}
""".replace("\n", "\n    ")
CUT = """
import socket
for fd in map(int, os.listdir("/proc/self/fd")):
    try:
        mine = socket.socket(fileno=os.dup(fd))
        if mine.family == socket.AF_INET and mine.type == socket.SOCK_STREAM:
            mine.getpeername()  # the library listens, too
            mine.shutdown(socket.SHUT_RDWR)
        mine.close()
    except OSError:
        pass
""".replace("\n", "\n    ")
"""Each connection over the network ends, as by a reset, and the processes go on."""
OPTIONS = ["-np", "3", "--min-np", "1", "--warmup-steps", "10"]


def script(fault: str = KILL, *, two: bool = False, workers: int = 0) -> str:
    """fault: what befalls a rank. two: it has two optimizers. workers: of its DataLoader."""
    return TRAIN.replace("TWO", str(two)).replace("WORKERS", str(workers)).replace(KILL, fault)


def lacks(late: int, what: str = "bucket") -> str:
    """late: the step in which rank 1 waits for it. what: in the name of what it lacks."""
    return LACKS.replace("LATE", str(late)).replace("WHAT", what)


def run(
    launch: Callable[..., Result], faults: str, *options: str, two: bool = False, workers: int = 0, fault: str = KILL
) -> Result:
    """faults: rank:step:where, separated by commas."""
    return launch(script(fault, two=two, workers=workers), *OPTIONS, *options, "train.py", faults)


def survivors(result: Result) -> dict[int, str]:
    """The weights at the end, by rank."""
    lines = [line.split() for line in result.out.decode().splitlines() if "ends with" in line]
    return {int(words[0].strip("[")[0]): words[-1] for words in lines}
