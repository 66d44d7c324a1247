"""Gossip: each rank trains at its own speed, and averages with one other at a time."""

from __future__ import annotations

import re
from itertools import chain

import pytest
import torch
from harness.gossip_script import AVERAGE, PRELUDE, assert_averaged
from harness.patience import PATIENCE

from dadt.inject.files.saving import PATIENCE_SECONDS


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (4, ["--executor", "shm"]),
        pytest.param(3, ["--executor", "gloo", "--topology", "ring"], marks=pytest.mark.slow),
        pytest.param(2, ["--executor", "gloo"], marks=pytest.mark.slow),
        pytest.param(5, ["--executor", "shm", "--topology", "complete"], marks=pytest.mark.slow),
        pytest.param(4, ["--executor", "hierarchical"], marks=pytest.mark.slow),
    ],
)
def test_the_mean_stays_and_the_ranks_come_together(dadt_run, size, options) -> None:
    run = dadt_run(PRELUDE + AVERAGE, "--algorithm", "gossip", *options, np=size)
    assert_averaged(run.ranks)
    for r in run.ranks:
        for near, start, mean in zip(r["near"], r["starts"], r["end"], strict=True):
            assert float((near - mean).abs().max()) < 0.01 * float((start - mean).abs().max())
    torch.testing.assert_close(torch.stack([r["own"] for r in run.ranks]).mean(0), run.ranks[0]["joint"])
    assert len({r["joint"].numpy().tobytes() for r in run.ranks}) == 1
    assert len({r["own"].numpy().tobytes() for r in run.ranks}) == size
    (line,) = [line for line in run.lines() if "gossip: " in line]
    told = re.search(r"gossip: ([\d,]+) exchanges, (\d+) steps? old at the median \((\d+) steps? at most\)", line)
    assert told, line
    assert int(told[1].replace(",", "")) >= 12 * size
    assert 1 <= int(told[2]) <= int(told[3])


@pytest.mark.parametrize(
    ("compression", "size", "executor", "least"),
    [
        ("int8", 4, "shm", 2.5),
        pytest.param("bf16", 3, "gloo", 1.7, marks=pytest.mark.slow),
        pytest.param("powersgd:8", 2, "gloo", 3.0, marks=pytest.mark.slow),
        pytest.param("int8", 4, "hierarchical", 2.5, marks=pytest.mark.slow),
    ],
)
def test_compressed_ranks_come_together_as_well(dadt_run, compression, size, executor, least) -> None:
    options = ["--algorithm", "gossip", "--executor", executor, "--compression", compression]
    run = dadt_run(PRELUDE + AVERAGE, *options, np=size)
    assert_averaged(run.ranks)
    for r in run.ranks:
        for near, start, mean in zip(r["near"], r["starts"], r["end"], strict=True):
            assert float((near - mean).abs().max()) < 0.01 * float((start - mean).abs().max())
    # The first exchange of two ranks is of the weights as they are.
    less = float(re.search(r"sent .* MB per step, (\d+\.\d)x less than uncompressed", run.output)[1])
    assert less >= least, run.output


UNUSUAL = """
    more = nn.Parameter(torch.zeros(3))
    given_twice = [*model.parameters(), *model.parameters()]
    optimizers = [torch.optim.SGD(each, lr=0.0) for each in (given_twice, model.parameters(), model[3].parameters())]
    optimizer, others = optimizers[0], optimizers[1:]
    scatter()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float(rank))
    torch.set_default_dtype(torch.bfloat16)             # as for another model
    torch.set_default_device("meta")                    # stands for a GPU, where all that is made would be
    inputs = torch.randn(2, 7, dtype=torch.float32, device="cpu")
    seen = []

    def train():
        for each in optimizers:
            each.zero_grad()
            (model(inputs).sum() + more.sum().to(inputs)).backward()
            time.sleep(0.002)
            each.step()
        seen.append(max(float(p.abs().max()) for p in model.parameters()))

    while not all_told("enough"):
        train()
        if gossip().exchanges >= 40:
            Path(f"enough{rank}").touch()
    optimizer.add_param_group({"params": [more]})
    for _ in range(10):
        train()
    if rank == 0 and "int8" in os.environ["DADT_COMPRESSION"]:
        model.half()                                    # as for a smaller file
    elif rank == 0:
        model[0].weight.data[0, 0] = torch.nan
    worker.runtime.close()
    report({"most": max(seen), "last": float(model[0].weight.float().mean())})
"""


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["int8", pytest.param("none", marks=pytest.mark.slow)])
def test_weights_that_are_given_twice_and_defaults_that_the_script_sets(dadt_run, compression) -> None:
    run = dadt_run(PRELUDE + UNUSUAL, "--algorithm", "gossip", "--compression", compression)
    told = "is left out: rank 1's weights have other shapes or dtypes"
    if compression == "none":
        told = "is without the weights of rank 0, which hold infinity or NaN"
    assert f"the average at the end {told}" in run.output
    for r in run.ranks:
        assert r["most"] < 1.01  # between the two
        assert r["last"] == pytest.approx(0.5, abs=0.01)


STOPPED = """
    starts = scatter()
    free = [r for r in range(world) if r != STOPPED]
    # Its size is the number of steps. Opened once: DADT lets one rank at a time open a file, and one that is stopped
    # meanwhile holds up the others.
    steps = open(f"step{rank}", "ab", buffering=0)

    def taken(r):
        path = Path(f"step{r}")
        return path.stat().st_size if path.exists() else 0

    def train():
        step()
        steps.write(b".")

    def stop():
        pid = worker.runtime.ranks.control.peers()[STOPPED]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            before, exchanges = {r: taken(r) for r in free}, gossip().exchanges
            await_that(
                lambda: all(taken(r) >= before[r] + 20 for r in free) and gossip().exchanges >= exchanges + 10,
                lambda: (before, {r: taken(r) for r in free}, gossip().exchanges),
                meanwhile=train,
            )
        finally:
            os.kill(pid, signal.SIGCONT)

    told = rank == STOPPED
    while not all(Path(f"enough{r}").exists() for r in free):
        train()
        if not told and gossip().exchanges >= 5 and taken(STOPPED) >= 5:
            if rank == STOPPER:
                stop()
            Path(f"enough{rank}").touch()
            told = True
    worker.runtime.close()
    report({"starts": starts, "end": [p.detach() for p in model.parameters()]})
"""


@pytest.mark.parametrize(
    ("stopped", "stopper", "executor"),
    [(1, 2, "shm"), pytest.param(0, 2, "gloo", marks=pytest.mark.slow)],
    ids=["one that answers", "one that asks"],
)
def test_a_stopped_rank_delays_nobody_and_its_late_answer_counts(dadt_run, stopped, stopper, executor) -> None:
    script = (PRELUDE + STOPPED).replace("STOPPED", str(stopped)).replace("STOPPER", str(stopper))
    run = dadt_run(script, "--algorithm", "gossip", "--executor", executor, np=4)
    assert_averaged(run.ranks)


STRAGGLER = """
    slow, fast = 3, (0, 1, 2)
    steps = {r: Path(f"steps{r}") for r in fast}

    def taken():
        # Its size is the number of steps.
        return {r: path.stat().st_size if path.exists() else 0 for r, path in steps.items()}

    step()
    if rank == slow:
        for _ in range(10):
            before = taken()
            # Its own step takes as long as 3 of theirs.
            await_that(lambda: all(now >= before[r] + 3 for r, now in taken().items()), lambda: (before, taken()))
            step()
        Path("enough").touch()
    while rank != slow and not Path("enough").exists():
        step()
        with open(steps[rank], "a") as f:
            f.write(".")
    report(gossip().exchanges)
"""


@pytest.mark.slow
def test_the_others_keep_their_pace_beside_a_slow_rank(dadt_run) -> None:
    """Beside one that is stopped altogether, they do so in each run."""
    run = dadt_run(PRELUDE + STRAGGLER, "--algorithm", "gossip", np=4)
    assert len(run.ranks) == 4


EARLY = """
    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(21.0).view(21, 1))

    class Norm(nn.Module):
        # Has a statistic of its own, which training changes.
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
            self.register_buffer("mean", torch.zeros(1))
        def forward(self, x):
            if self.training:
                self.mean += x.mean() + 1
            return self.inner(x)

    def train():
        model = Norm()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        loader = DataLoader(Stream(), batch_size=2)
        seen = []
        for epoch in range(1 if rank else 3):  # rank 1 is done long before
            for x in loader:
                seen.append(x.view(-1).tolist())
                optimizer.zero_grad()
                loss = model(x).sum()
                if rank == 0 and len(seen) == 3:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
        model.eval()
        begun = time.monotonic()
        for i in range(6 * rank):  # rank 0 never saves
            torch.save(model.state_dict(), "model.pt")
        own = {k: v.clone() for k, v in torch.load("model.pt").items()} if rank else None
        return model, {"seen": seen, "scale": scaler.get_scale(), "saving": time.monotonic() - begun, "own": own}

    kept, found = train()  # the optimizer is gone
    model = nn.Linear(3, 1)
    closes = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for _ in range(2 + rank):
        def closure():
            closes.zero_grad()
            loss = (model(torch.eye(3)) - rank).pow(2).sum()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            return loss
        closes.step(closure)
    worker.runtime.close()
    report({**found, "kept": kept.state_dict(), "end": model.state_dict()})
"""


def test_what_a_rank_does_concerns_no_other(dadt_run) -> None:
    """Streams of different lengths, an infinity, saving, a statistic, an optimizer that is collected, a closure."""
    one, other = dadt_run(PRELUDE + EARLY, "--algorithm", "gossip", "--batch", "per-rank").ranks
    assert (len(one["seen"]), len(other["seen"])) == (18, 5)  # batches of 2, the last of 1
    assert sorted(chain(*one["seen"][:6], *other["seen"])) == list(range(21))  # each sample once, by one of them
    assert (one["scale"], other["scale"]) == (512.0, 1024.0)
    assert other["saving"] < 6 * PATIENCE_SECONDS  # what its saves would take if rank 0 were waited for
    assert other["own"].keys() == other["kept"].keys()
    for name, value in one["end"].items():
        assert torch.equal(value, other["end"][name])


@pytest.mark.parametrize("executor", [pytest.param("shm", marks=pytest.mark.slow), "gloo"])
def test_a_failure_ends_all_ranks(dadt_run, executor) -> None:
    script = """
    import threading
    from dadt.algorithms.gossip.pairing import Pairing
    def left():
        names = [t.name for t in threading.enumerate() if t.name.startswith("dadt-")]
        print(f"rank {rank} ends with", names, flush=True)
    def busy(pairing):
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            torch.ones(1000).sum()
    Pairing._let_go = busy  # a thread that is in torch where the interpreter ends aborts the process
    step()
    worker.runtime.events.on_stop.append(left)  # after the gossip's own
    while True:
        step()
        if rank == 1 and gossip().exchanges >= 3:
            raise OSError("the disk of rank 1 is full")
    """
    run = dadt_run(PRELUDE + script, "--algorithm", "gossip", "--executor", executor, np=3, code=None)
    assert run.code == 1
    assert "rank 1 ends with []" in run.output
    assert "OSError: the disk of rank 1 is full" in run.output
    assert "terminate called" not in run.output and "dadt: worker 1 failed" in run.output


@pytest.mark.slow
def test_the_end_waits_for_a_rank_no_longer_than_the_timeout(dadt_run) -> None:
    script = """
    for _ in range(5):
        step()
    if rank == 1:
        time.sleep(12)
    """
    run = dadt_run(PRELUDE + script, "--algorithm", "gossip", "--timeout", "3")
    assert re.search(r"waited \d+ s at the end: rank 1 ", run.output), run.output
    assert "NOT distributed" not in run.output and "5 steps" in run.output.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(660)
def test_the_digits_are_learned(dadt_run) -> None:
    script = """
    from scripts import digits
    report(digits.train(0, 0.1, 200))
    """
    accuracies = dadt_run(script, "--algorithm", "gossip", np=4, timeout=5 * PATIENCE).ranks
    assert min(accuracies) > 0.95, accuracies


@pytest.mark.slow
@pytest.mark.timeout(660)
@pytest.mark.parametrize("compression", ["int8", "powersgd:4"])
def test_the_digits_are_learned_with_compression(dadt_run, compression) -> None:
    script = """
    from scripts import digits
    report(digits.train(0, 0.1, 200))
    """
    accuracies = dadt_run(
        script, "--algorithm", "gossip", "--compression", compression, np=4, timeout=5 * PATIENCE
    ).ranks
    assert min(accuracies) > 0.95, accuracies
