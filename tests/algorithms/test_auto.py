"""`--algorithm auto` measures, and all ranks take the same."""

from __future__ import annotations

import re

import pytest
import torch
from harness.checks import assert_equal, assert_near
from harness.scenarios import STEPS, simulate

from dadt.train.measure import Measure

WARMUP = 10

REAL = """
    import time
    from harness import scenarios
    backward = scenarios.backward
    def computing(*args):
        time.sleep(0.01)  # long beside an exchange of some hundred bytes
        backward(*args)
    scenarios.backward = computing
    report(scenarios.train("momentum", rank))
"""


def test_sync_where_the_exchange_is_short(dadt_run) -> None:
    torch.set_num_threads(1)
    run = dadt_run(REAL, "--algorithm", "auto", "--warmup-steps", str(WARMUP))
    line = next(line for line in run.lines() if "--algorithm auto" in line)
    assert re.search(r"warm-up done after 10 steps: compute \d.* ms, exchange .* \(r = 0\.\d\d\)", line), line
    assert "takes sync, which is as fast here" in line
    assert "24 steps, none delayed" in run.lines()[-1]
    for rank in run.ranks:
        assert_equal(rank, simulate("momentum", 2, "sync"), "sync")


TIMES = """
    import dadt.train.measure, gc
    from harness import scenarios
    made = []
    first = dadt.train.measure.Measure.__init__
    def noted(self):
        first(self)
        made.append(self)
    dadt.train.measure.Measure.__init__ = noted
    # Rank 1 computes faster: by its own clock alone it would decide otherwise.
    dadt.train.measure.Measure.compute = property(lambda self: 0.010 if rank == 0 else 0.002)
    dadt.train.measure.Measure.exchange = property(lambda self: [0.003, 0.018, 0.025][made.index(self)])
    found = []
    for _ in range(3):
        found.append(scenarios.train("momentum", rank))
        gc.collect()
    report(found)
"""


def test_ranks_agree_by_the_slowest(dadt_run) -> None:
    """Only the clocks are not real."""
    torch.set_num_threads(1)
    run = dadt_run(TIMES, "--algorithm", "auto", "--warmup-steps", str(WARMUP))
    lines = [line for line in run.lines() if "--algorithm auto" in line and "takes" in line]
    assert len(lines) == 3
    assert "(r = 0.30): --algorithm auto takes sync, which" in lines[0]
    assert "(r = 1.80): --algorithm auto of optimizer #2 takes pipe, which hides" in lines[1]
    assert "(r = 2.50): --algorithm auto of optimizer #3 takes pipe with int8 compression" in lines[2]
    for rank in run.ranks:
        assert_equal(rank[0], simulate("momentum", 2, "sync", warmup=WARMUP), "sync")
        assert_near(rank[1], simulate("momentum", 2, "pipe", warmup=WARMUP), "pipe")
    assert_equal(run.ranks[0][2], run.ranks[1][2], "replicas")
    exact = simulate("momentum", 2, "pipe", warmup=WARMUP)
    assert not all(torch.equal(run.ranks[0][2][name], exact[name]) for name in exact), "int8 rounds"
    assert all(torch.allclose(run.ranks[0][2][name], exact[name], atol=0.05) for name in exact)
    delayed = 2 * (STEPS - WARMUP)
    assert f"{3 * STEPS} steps, {delayed} of them delayed by one" in run.lines()[-1]


CHOSEN = """
    import dadt.train.measure, pathlib
    dadt.train.measure.Measure.compute = property(lambda self: 0.010)
    dadt.train.measure.Measure.exchange = property(lambda self: 0.025)
    torch.manual_seed(rank)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    resumed = {resumed!r}
    if resumed:
        optimizer.load_state_dict(torch.load(f"after{{resumed}}.pt", weights_only=True))
    for step in range(resumed, 22):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        if not resumed and step + 1 in (11, 15):
            torch.save(optimizer.state_dict(), f"after{{step + 1}}.pt")
"""


@pytest.mark.slow
def test_what_a_checkpoint_says_of_the_choice(dadt_run) -> None:
    """It counts, unless the user has given another compression since; and a choice that was not made yet is made."""

    def run(resumed: int, *options: str) -> tuple[int, str]:
        done = dadt_run(CHOSEN.format(resumed=resumed), "--algorithm", "auto", *options)
        return done.output.count("--algorithm auto takes pipe with int8"), done.lines()[-1]

    said, _ = run(0, "--warmup-steps", "12")
    assert said == 1
    said, last = run(15, "--warmup-steps", "12")
    assert said == 0 and "3.9x less" in last
    said, last = run(15, "--warmup-steps", "12", "--compression", "bf16")
    assert said == 0 and "2.0x less" in last
    said, last = run(11, "--warmup-steps", "10")
    assert said == 1 and "3.9x less" in last


@pytest.mark.parametrize(
    ("exchange", "meaning"),
    [
        (0.0066, "(r = 0.66): communication is hidden; sync would be as fast here"),
        (0.0068, "(r = 0.68): compute hides 100% of communication; sync would be slower"),
        (0.0160, "(r = 1.60): compute hides 62% of communication; sync would be slower"),
        (0.0201, "(r = 2.01): the network bounds the speed: send fewer bytes (--compression int8)"),
    ],
)
def test_what_the_ratio_means(exchange, meaning) -> None:
    measure = Measure()
    measure.load_state({"compute": [0.5, 0.01, 0.01], "exchange": [exchange, exchange, 0.9]})
    assert meaning in measure.verdict(50, 2)


def test_steps_that_one_worker_alone_does_faster_are_told(monkeypatch) -> None:
    def verdict(added: float, workers: int) -> str:
        """Steps compute for 0.4 ms, and are so much longer by hooks."""
        measure, now, hooked = Measure(), 0.0, 0.0
        for _ in range(9):
            now, hooked = now + 0.0004 + added, hooked + added
            monkeypatch.setattr("dadt.train.measure.perf_counter", lambda now=now: now)
            measure.stepped(hooked)
        return measure.verdict(9, workers)

    told = "one worker alone would be faster, as a step computes for 0.40 ms and takes 0.70 ms more"
    assert told in verdict(0.0007, 2)
    assert "alone" not in verdict(0.0007, 4)
    assert "alone" not in verdict(0.0003, 2)


def test_too_short_a_warm_up_to_measure(dadt_run) -> None:
    run = dadt_run("", "--algorithm", "auto", "--warmup-steps", "3", code=None)
    assert run.code == 2
    assert run.lines()[-1].endswith(
        "--algorithm auto measures in the synchronous steps: give --warmup-steps 10 or more"
    )
