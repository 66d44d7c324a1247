"""A new worker's script is made again beside the running job, and takes the place of a lost one."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from harness.journal import EVENTS, whole_lines
from harness.patience import PATIENCE, await_that
from harness.replayed import HEAD

OPTIONS = ["--min-np", "1", "--warmup-steps", "5", "--snapshot-every", "1000steps", "--seed", "7"]

# The loop ends 20 steps after as many new workers have joined as are to be lost: all ranks read the same number.
REGROWS = (
    EVENTS
    + """
import itertools
rank, joins = int(os.environ["DADT_RANK"]), os.environ.get("DADT_JOINS") == "1"
victims = [int(each) for each in os.environ["VICTIMS"].split(",")]

def over():
    return os.path.exists("stop") if victims == [-1] else len(events("join")) == len(victims)

def goes_on(n):
    if n == 0:  # what is read before the first forward counts as a checkpoint of the script's own
        return True
    if n % 10 == 0 and not os.path.exists("end") and over():
        with open(f"end.{rank}", "w") as file:
            file.write(str(n + 20))
        os.replace(f"end.{rank}", "end")
    if os.path.exists("end"):
        with open("end") as file:
            return n < int(file.read())
    return True

def dies(n):
    if victims == [-1]:
        return
    joined = len(events("join")) if n % 10 == 0 else len(victims)
    if n >= 20 and joined < len(victims) and len(events("regroup")) == joined and victims[joined] == rank:
        os.kill(os.getpid(), signal.SIGKILL)
"""
)

LOOPS = {
    "classifier": """
model = net(8, 300, 300, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30, gamma=0.9)
best, n, loader = float("inf"), 0, DataLoader(data, batch_size=8, shuffle=True)
while goes_on(n):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        n += 1
        best = min(best, loss.item())
        dies(n)
        if not goes_on(n):
            break
tell(model, more=[n, scheduler.get_last_lr()])
""",
    "gan": """
generator, critic = net(4, 200, 8), net(8, 200, 1)
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
d_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
n = 0
while goes_on(n):
    for x, _ in DataLoader(data, batch_size=8, shuffle=True):
        fake = generator(torch.randn(len(x), 4))
        d_loss = F.softplus(-critic(x)).mean() + F.softplus(critic(fake.detach())).mean()
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()
        g_loss = F.softplus(-critic(fake)).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        n += 1
        dies(n)
        if not goes_on(n):
            break
tell(generator, critic, more=[n])
""",
}


def ends(result, ranks: int) -> None:
    """All ranks with the same weights."""
    assert result.code == 0, result.err
    lines = [line.split() for line in result.out.decode().splitlines() if "ends with" in line]
    assert sorted(words[0] for words in lines) == [f"[{rank}]" for rank in range(ranks)], result.err
    assert len({words[-1] for words in lines}) == 1, result.out


@pytest.mark.parametrize(
    ("algorithm", "name", "ranks", "victims"),
    [
        ("pipe", "classifier", 2, "1"),
        pytest.param("sync", "classifier", 3, "0", marks=pytest.mark.slow),
        pytest.param("pipe", "gan", 2, "0", marks=pytest.mark.slow),
        pytest.param("sync", "gan", 2, "1", marks=pytest.mark.slow),
        pytest.param("pipe", "classifier", 3, "1,0,2,0,1,2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(400)
def test_a_new_worker_takes_the_place_of_a_lost_one(start, algorithm, name, ranks, victims) -> None:
    options = ["-np", str(ranks), "--algorithm", algorithm, *OPTIONS]
    result = start(HEAD + REGROWS + LOOPS[name], *options, "train.py", VICTIMS=victims).finish(3 * PATIENCE)
    ends(result, ranks)
    assert result.err.count("training goes on without it") == len(victims.split(","))
    assert result.err.count("a new worker starts in place of rank") == len(victims.split(","))
    assert "Traceback" not in result.err


APART = """
import atexit
atexit.register(lambda: tell(model, more=[n, joins or norm > 0]))  # after the last average, as torch comes later
""" + HEAD.replace("BatchNorm1d", "LayerNorm")
ALONE = """
model, n, norm = net(8, 32, 4), 0, 0.0
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(data, batch_size=8, shuffle=True)
while goes_on(n):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norm += float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        n += 1
        dies(n)
        if not goes_on(n):
            break
"""


@pytest.mark.parametrize(
    ("options", "ranks", "victims"),
    [
        (("--sync-every", "4"), 2, "1"),
        pytest.param(
            ("--sync-every", "6", "--fragments", "3", "--compression", "int8"), 3, "0,2", marks=pytest.mark.slow
        ),
        pytest.param(("--outer-momentum", "0.9", "--sync-every", "auto"), 2, "0", marks=pytest.mark.slow),
        pytest.param(("--sync-every", "3", "--warmup-steps", "0"), 3, "1,0,2,1", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(400)
def test_a_new_worker_joins_ranks_that_train_alone(start, options, ranks, victims) -> None:
    options = ["-np", str(ranks), "--algorithm", "local", *OPTIONS, *options]
    result = start(APART + REGROWS + ALONE, *options, "train.py", VICTIMS=victims).finish(3 * PATIENCE)
    ends(result, ranks)
    assert result.err.count("a new worker starts in place of rank") == len(victims.split(","))
    assert "Traceback" not in result.err


EVENLY = """
import time
samples = torch.arange(240)
model = torch.nn.Embedding(240, 1)
torch.nn.init.zeros_(model.weight)
optimizer, n, uneven = torch.optim.SGD(model.parameters(), lr=1.0), 0, []
loader = DataLoader(torch.utils.data.TensorDataset(samples), batch_size=8, shuffle=True)
while goes_on(n):
    before, lost, steps = model.weight.detach().clone(), len(events("regroup")) if n else 0, 0
    for (i,) in loader:
        optimizer.zero_grad()
        model(i).mean().backward()
        time.sleep(0.01)  # so that a replay is faster
        optimizer.step()
        n, steps = n + 1, steps + 1
        dies(n)
        if not goes_on(n):
            break
    moved = before - model.weight.detach()
    spread = (moved.max() - moved.min()).item()  # each sample moves its weight as often as it is read
    if lost and steps == 10 and spread > 1e-4:
        uneven.append((n, lost, len(events("regroup"))))
if rank == 0:
    print("uneven", uneven, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_new_worker_does_not_read_what_the_others_have_divided(start) -> None:
    options = ["-np", "3", "--algorithm", "sync", "--redistribute", *OPTIONS]
    result = start(HEAD + REGROWS + EVENLY, *options, "train.py", VICTIMS="1").finish(3 * PATIENCE)
    assert result.code == 0, result.err
    assert "a new worker starts in place of rank 1" in result.err
    assert "uneven []" in result.out.decode(), result.out


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("seed", "local"), [(0, False), (1, False), (2, False), (3, True)])
def test_workers_may_be_killed_at_any_time(start, tmp_path, seed: int, local: bool) -> None:
    """Also new ones, while they start, in their replays, and when they join. One that trains is left each time."""
    chance = Random(seed)
    script = APART + REGROWS + ALONE if local else HEAD + REGROWS + LOOPS["classifier"]
    algorithm = ["local", "--sync-every", "4"] if local else [chance.choice(["pipe", "sync"])]
    options = ["-np", "3", "--algorithm", *algorithm, *OPTIONS]
    run = start(script, *options, "train.py", VICTIMS="-1")

    def events() -> list[dict[str, Any]]:
        return whole_lines(tmp_path / "dadt-logs" / run.job / "events.jsonl")

    def trains() -> set[int]:
        """Ranks that do, as far as is known."""
        found: set[int] = set()
        for event in events():
            if event["kind"] in ("claim", "join"):
                found.add(event["rank"])
            elif event["kind"] in ("exit", "failed"):
                found.discard(event["rank"])
        return found

    await_that(lambda: len(trains()) == 3, "three ranks train")
    for _ in range(10):
        time.sleep(chance.uniform(0.0, 5.0))  # the moment is what is tried
        pids = {event["rank"]: event["pid"] for event in events() if event["kind"] == "started"}
        rank = chance.choice([rank for rank in range(3) if len(trains() - {rank}) > 0])
        with suppress(ProcessLookupError):
            os.kill(pids[rank], signal.SIGKILL)
        await_that(lambda: len(trains()) > 0, "somebody trains")
    await_that(lambda: len(trains()) == 3, "three ranks train again")
    (tmp_path / "stop").touch()
    ends(run.finish(), 3)
