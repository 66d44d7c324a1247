"""`--algorithm auto` and `--compression auto` measure, and all ranks choose the same."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from harness import ROOT
from harness.checks import assert_equal, assert_near, assert_replicas_equal
from harness.scenarios import STEPS, simulate
from harness.survivors import KILL_ONCE_DELIVERED, OPTIONS, lacks, script, survivors

from benchmarks.page import read
from dadt.algorithms.auto import choice
from dadt.algorithms.auto.choice import Shape, Times
from dadt.algorithms.auto.ways import SHOWN, WIRE, Choice, sent
from dadt.train.measure import Measure
from dadt.train.progress import Progress

WARMUP = 10
BOTH = ["--algorithm", "auto", "--compression", "auto"]
SHAPE = Shape(shares=[1.0], sync_every=32)
MB = 1e6


def times(exchange: dict[str, float], *, processor: float = 0.0, handling: float = 0.0, cores: float = 1.0) -> Times:
    """Beside a step that computes for 100 ms; int4 takes what int8 does, if not given."""
    exchange = {"int4": exchange.get("int8", 0.0), **exchange}
    steps = {name: 0.1 + each for name, each in exchange.items()}
    return Times(0.1, 0.1, processor, cores, steps, exchange, dict.fromkeys(exchange, handling), may_part=True)


def link(rate: float, size: float) -> dict[str, float]:
    """Seconds in which two ranks exchange so many bytes over so many bits a second, and what handling them takes."""
    costs = {"none": 0.5e-9, "bf16": 1.5e-9, "int8": 2e-9, "int4": 2e-9}
    return {name: 8 * size * WIRE[name] / rate + costs[name] * size for name in costs}


def chosen(found: Times, kind: str = "sgd", shape: Shape = SHAPE) -> str:
    shown, times = SHOWN[kind], choice.completed(found)
    ways = [way for way in shown.costs if way.compression in times.exchange]
    return str(choice.best({way: choice.seconds(way, times, shape) for way in ways}, shown.costs, shown.doubling))


@pytest.mark.parametrize(
    ("rate", "sgd", "adam"),
    [
        (2.5e6, "local with int4 every 8 steps", "local with int4 every 8 steps, merged at once"),
        (10e6, "local with int4 every 8 steps", "pipe with momentum:1"),
        (25e6, "local with int4 every 8 steps", "pipe with momentum:2"),
        (50e6, "pipe with int4", "pipe with int4"),
        (100e6, "pipe with int8", "pipe with int8"),
        (1e9, "pipe", "pipe"),
        (10e9, "sync", "sync"),
        (1e12, "sync", "sync"),
    ],
)
def test_the_faster_the_link_the_less_is_changed(rate: float, sgd: str, adam: str) -> None:
    found = times(link(rate, 4 * MB if rate < 1e10 else 2 * MB))
    assert (chosen(found), chosen(found, "adam")) == (sgd, adam)


def test_loss_counts_as_steps_that_would_make_up_for_it() -> None:
    exact, lossy = Choice("pipe", "none"), Choice("pipe", "int4")
    costs = {exact: 0.0, lossy: 0.1}
    assert choice.best({exact: 1.9, lossy: 1.0}, costs, doubling=0.1) == exact
    assert choice.best({exact: 2.09, lossy: 1.0}, costs, doubling=0.1) == exact, "5 % are nothing"
    assert choice.best({exact: 2.11, lossy: 1.0}, costs, doubling=0.1) == lossy


def test_times_of_momentum_follow_from_its_bytes() -> None:
    found = choice.completed(times({"none": 1.0, "int8": WIRE["int8"] + 0.02, "int4": WIRE["int4"] + 0.02}))
    for name in ("momentum:2", "momentum:1"):
        assert found.exchange[name] == pytest.approx(WIRE[name] + 0.02)
        assert found.step[name] == pytest.approx(found.exchange[name] + 0.1)
    unmeasured = times({"none": 1.0, "int4": 0.2})
    assert choice.completed(unmeasured).exchange.keys() == unmeasured.exchange.keys()
    alone = choice.completed(times({"int4": WIRE["int4"]}))
    assert alone.exchange["momentum:1"] == pytest.approx(WIRE["momentum:1"])


def test_a_link_that_carries_a_burst_at_once_is_no_faster_than_its_bytes() -> None:
    found = choice.completed(times({"none": 1.0, "int8": 0.3, "int4": 0.001}))
    for name in ("int4", "momentum:2", "momentum:1"):
        assert found.exchange[name] == pytest.approx(WIRE[name], rel=0.01)
        assert found.step[name] == pytest.approx(found.exchange[name] + 0.1)


def test_bytes_that_a_way_spares() -> None:
    assert sent(Choice("pipe", "int4"), adaptive=True) == pytest.approx(132 / 1024)
    assert sent(Choice("local", "int4", 8), adaptive=False) == pytest.approx(132 / 1024 / 8)
    # Adam's second moments go every 50 steps, in 8 bits.
    assert 1 / sent(Choice("pipe", "momentum:1"), adaptive=True) == pytest.approx(24.8, abs=0.1)
    assert 1 / sent(Choice("local", "int4", 8), adaptive=True) == pytest.approx(47.2, abs=0.1)


def test_the_page_of_accuracy_has_the_same_costs() -> None:
    page = ROOT / "docs" / "results" / "accuracy.md"
    tables = read(page, "costs")
    assert len(tables) == len(SHOWN)
    for shown, table in zip(SHOWN.values(), tables, strict=True):
        way = next(name for name in table[0] if shown.of in name)
        assert {row[way]: float(row["loss above `sync`"]) for row in table} == {
            str(way): cost for way, cost in shown.costs.items()
        }
        assert f"{shown.doubling:g} lower for {shown.of}" in " ".join(page.read_text().split())


def test_buckets_that_go_during_the_backward_are_hidden() -> None:
    found = times({"none": 0.06, "bf16": 0.05, "int8": 0.05})
    assert chosen(found) == "pipe"
    assert chosen(found, shape=Shape([0.1] * 10, 32)) == "sync"
    assert choice.seconds(Choice("sync", "none"), found, Shape([0.5, 0.5], 32)) == pytest.approx(0.13)


def test_what_an_exchange_takes_of_cores_that_compute_is_no_faster_in_the_background() -> None:
    exchange = {"none": 0.03, "bf16": 0.03, "int8": 0.03}
    assert chosen(times(exchange)) == "pipe"
    assert choice.seconds(Choice("pipe", "none"), times(exchange, processor=0.1, handling=0.03), SHAPE) == 0.13
    assert chosen(times(exchange, processor=0.1, handling=0.03, cores=2)) == "pipe"


def test_what_is_not_behind_a_backward_is_not_hidden() -> None:
    """With batches that add up, buckets go as the last of their backwards completes them."""
    found, late = times(dict.fromkeys(("none", "bf16", "int8"), 0.09)), Choice("sync", "none")
    once, often = (choice.seconds(late, dataclasses.replace(found, backwards=k), Shape([0.1] * 10, 32)) for k in (1, 8))
    assert (once, often) == (pytest.approx(0.13), pytest.approx(0.1825))
    assert chosen(dataclasses.replace(found, backwards=8)) == "pipe"


def test_waits_for_another_optimizers_exchange_are_no_compute(monkeypatch) -> None:
    rank, now = Progress(), 0.0
    one, other = Measure(rank), Measure(rank)
    for _ in range(3):
        for measure in (one, other):
            now += 0.010
            measure.exchanged(0.020, 0.020)
            now += 0.020
            monkeypatch.setattr("dadt.train.measure.perf_counter", lambda now=now: now)
            measure.stepped()
    assert [one.compute, other.compute] == pytest.approx([0.020, 0.020])
    assert [one.waited, other.waited] == pytest.approx([0.040, 0.040])


def test_the_slowest_ranks_numbers_count() -> None:
    one = Times(0.1, 0.1, 0.05, 2.0, {"none": 0.4}, {"none": 0.3, "int8": 0.1}, {"none": 0.01}, may_part=True)
    other = Times(0.2, 0.0, 0.01, 1.0, {"none": 0.3}, {"none": 0.1, "int8": 0.2}, {"none": 0.03}, may_part=False)
    both = Times(0.2, 0.1, 0.05, 1.0, {"none": 0.4}, {"none": 0.3, "int8": 0.2}, {"none": 0.03}, may_part=False)
    assert choice.slowest([one, other]) == choice.slowest([other, one]) == both


def test_what_ranks_lose_by_waiting_for_each_other_in_each_step_counts() -> None:
    found = times({"none": 0.001, "bf16": 0.001, "int8": 0.001})
    assert chosen(found) == "sync"
    assert chosen(dataclasses.replace(found, step=dict.fromkeys(found.step, 0.13))) == "pipe"
    assert (
        chosen(dataclasses.replace(found, compute=0.13, step=dict.fromkeys(found.step, 0.14))) == "local every 8 steps"
    )


REAL = """
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(16):
        optimizer.zero_grad()
        model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
    report(dict(model.state_dict()))
"""


def test_a_slow_link(dadt_run) -> None:
    run = dadt_run(REAL, *BOTH, "--warmup-steps", str(WARMUP), "--link", "10mbit")
    (line,) = (line for line in run.lines() if " chooses " in line)
    found = r"after 10 steps: compute \S+ ms, exchange (\d+)\.\d ms, as int8 \S+ ms, as int4 \S+ ms: --algorithm auto"
    match = re.search(found, line)
    assert match is not None and int(match[1]) > 200, line
    # A step computes for about a twentieth of that exchange.
    few = r"chooses (pipe with momentum:\d|local with int4 every \d steps, merged at once): "
    assert re.search(f"--compression auto {few}[^;]+; it sends \\d\\dx less and ends 0.0", line), line


FAKE = """
    import gc
    from dadt.algorithms.auto.auto import StepRecord
    from dadt.algorithms.auto.choice import Times
    exchanges = {exchanges}
    made = []
    first = StepRecord.__init__
    def noted(self):
        first(self)
        made.append(self)
    StepRecord.__init__ = noted
    def times(self, compute, alone, cores, *, may_part, backwards):
        exchange = exchanges[made.index(self)]
        exchange = {{name: exchange / (i + 1) for i, name in enumerate(self._moving)}}
        # Rank 1 computes faster: by its own clock alone it would decide otherwise.
        compute = 0.010 if rank == 0 else 0.0001
        step = {{name: compute + each for name, each in exchange.items()}}
        return Times(compute, compute, 0.0, 1.0, step, exchange, dict.fromkeys(exchange, 0.0), may_part)
    StepRecord.times = times
    StepRecord.link = (0.0, 1.0)
"""
# Late steps take what was expected of them, however loaded the machine is.
ON_TIME = """
    from dadt.algorithms.auto import auto
    auto.perf_counter = lambda: 0.0
"""
SENT = """
    sent = []
    recorded = StepRecord.exchanged
    def exchanged(self, compression, moving):
        sent.append(compression)
        recorded(self, compression, moving)
    StepRecord.exchanged = exchanged
    StepRecord.link = ({exchange} if rank else 0.0, 0.1)
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    resumed = {resumed}
    if resumed:
        optimizer.load_state_dict(torch.load("saved.pt", weights_only=True))
    for step in range(resumed, 20):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        if step + 1 == {saved}:
            torch.save(optimizer.state_dict(), "saved.pt")
    report(sent)
"""


def test_on_a_slow_link_two_steps_are_uncompressed(dadt_run) -> None:
    """Also in a training that is resumed while it measures. The link is that of the slowest rank."""

    def sent(exchange: float, *, resumed: int = 0, saved: int = 0) -> list[str]:
        script = FAKE.format(exchanges=[0.1]) + ON_TIME + SENT.format(exchange=exchange, resumed=resumed, saved=saved)
        first, second = dadt_run(script, *BOTH, "--warmup-steps", "14").ranks
        assert first == second
        return first

    slow = ["none"] * 2 + ["int8"] * 2 + ["int4"] * 9 + ["int8"]
    assert sent(0.41, saved=5) == slow
    assert sent(0.39, resumed=5) == slow[5:]
    assert sent(0.39) == ["none"] * 7 + ["int8"] * 3 + ["int4"] * 3 + ["none"]


THREE = """
    from harness import scenarios
    found = []
    for _ in exchanges:
        found.append(scenarios.train("momentum", rank))
        gc.collect()
    report(found)
"""


def test_ranks_agree_by_the_slowest(dadt_run) -> None:
    """Only the clocks are not real."""
    torch.set_num_threads(1)
    script = FAKE.format(exchanges=[0.0002, 0.010, 0.9]) + ON_TIME + THREE
    run = dadt_run(script, "--algorithm", "auto", "--warmup-steps", str(WARMUP))
    lines = [line for line in run.lines() if "--algorithm auto" in line and "chooses" in line]
    assert len(lines) == 3
    assert "compute 10.0 ms, exchange 0.20 ms: --algorithm auto chooses sync: 10.2 ms a step, and nothing" in lines[0]
    assert "--algorithm auto of optimizer #2 chooses pipe: 10.0 ms a step, where sync takes 20.0 ms; it" in lines[1]
    third = "--algorithm auto of optimizer #3 chooses local every 8 steps: 117.5 ms a step, where sync takes 910.0 ms"
    assert f"{third}; it sends 8x less and ends 0.0037 of loss above sync for the CNN" in lines[2]
    for rank in run.ranks:
        assert_equal(rank[0], simulate("momentum", 2, "sync", warmup=WARMUP), "sync")
        assert_near(rank[1], simulate("momentum", 2, "pipe", warmup=WARMUP), "pipe")
    assert not torch.equal(run.ranks[0][2]["0.weight"], run.ranks[1][2]["0.weight"])
    assert f"{3 * STEPS} steps, {STEPS - WARMUP} of them delayed by one" in run.lines()[-1]


SLOWER = """
    import time
    from harness import rounds as t
    torch.manual_seed(rank)
    model = t.mlp()
    optimizer = torch.optim.{optimizer}(model.parameters(), lr=1e-3)
    for step in range(32):
        t.backward(model, rank, step)
        time.sleep(0.03)
        optimizer.step()
        optimizer.zero_grad()
    t.at_the_end(lambda: report(t.values(model)))
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(("optimizer", "way"), [("Adam", "sync: 20.0 ms"), ("SGD", "local every 8 steps: 10.0 ms")])
def test_pipe_that_is_slower_than_predicted_gives_way(dadt_run, optimizer: str, way: str) -> None:
    torch.set_num_threads(1)
    script = FAKE.format(exchanges=[0.010]) + SLOWER.format(optimizer=optimizer)
    run = dadt_run(script, "--algorithm", "auto", "--warmup-steps", str(WARMUP))
    first, second = (line for line in run.lines() if "--algorithm auto" in line and "chooses" in line)
    assert "chooses pipe: 10.0 ms a step" in first
    late = re.search(r"after 8 late steps, of which each took (\d+)\.\d ms", second)
    assert late is not None and int(late[1]) >= 30, second
    assert f"--algorithm auto chooses {way} a step, " in second
    assert_equal(*run.ranks, "replicas")


COMPRESSED = """
    from harness import scenarios
    report([scenarios.train("adam", rank), scenarios.train("momentum", rank)])
"""


@pytest.mark.parametrize(
    ("algorithm", "second"), [("pipe", "chooses pipe with int8"), ("sync", "chooses sync with int4"), ("auto", "pipe")]
)
def test_a_compression_is_chosen_for_an_algorithm(dadt_run, algorithm: str, second: str) -> None:
    """With Adam bf16 is not tried."""
    torch.set_num_threads(1)
    script = FAKE.format(exchanges=[0.020, 0.030 if algorithm != "auto" else 0.010]) + ON_TIME + COMPRESSED
    options = ["--algorithm", algorithm, "--compression", "auto", "--warmup-steps", str(WARMUP)]
    run = dadt_run(script, *options)
    first, other = (line for line in run.lines() if "--compression auto" in line and "chooses" in line)
    assert "exchange 20.0 ms, as int8 10.0 ms, as int4 6.7 ms: --" in first
    few = "chooses sync with momentum:1" if algorithm == "sync" else "chooses pipe with int8: 10.0 ms a step"
    assert few in first
    assert ", as bf16 " in other and second in other
    for trained in zip(*run.ranks, strict=True):
        assert_equal(*trained, "replicas")


GIVEN = """
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    for step in range(60):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        schedule.step()
    (auto,) = [o for o in gc.get_objects() if type(o).__name__ == "Auto"]
    report([auto._found == {{}}, model.state_dict()])
"""


@pytest.mark.parametrize(
    ("optimizer", "way"), [("Adam", "pipe with momentum:1: 10.0 ms"), ("RMSprop", "pipe with int4: 10.0 ms")]
)
def test_momentum_that_is_given_is_measured_by_its_beginning(dadt_run, optimizer: str, way: str) -> None:
    """An optimizer that it does not suit sends int4 for the whole training, which is reviewed as well."""
    script = FAKE.format(exchanges=[0.010]) + ON_TIME + GIVEN.format(optimizer=optimizer)
    run = dadt_run(script, "--algorithm", "auto", "--compression", "momentum:1", "--warmup-steps", str(WARMUP))
    (line,) = (line for line in run.lines() if "--algorithm auto" in line and "chooses" in line)
    assert "exchange 10.0 ms as int4" in line
    sync = 10.0 + 10.0 * (WIRE["momentum:1"] / WIRE["int4"] if optimizer == "Adam" else 1.0)
    assert f"chooses {way} a step, where sync with {way.split()[2].rstrip(':')} takes {sync:.1f} ms" in line
    for reviewed, _ in run.ranks:
        assert reviewed
    assert_equal(*(state for _, state in run.ranks), "replicas")


APART = """
    from harness import rounds as t
    torch.manual_seed(rank)
    model = t.mlp()
    optimizer = t.optimizer(model)
    for step in range(t.STEPS):
        t.backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    own = t.values(model)
    t.at_the_end(lambda: report({"own": own, "end": t.values(model)}))
"""

ON_A_DEVICE = """
from dadt.config import extensions
extensions.EXECUTORS["gloo"] = "harness.as_nccl:connect"
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(16):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
from harness.rounds import at_the_end  # where ranks that went apart have met
at_the_end(lambda: report({"state": model.state_dict()}))
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (BOTH, "--algorithm auto, --compression auto chooses pipe:"),
        (["--algorithm", "local", "--compression", "auto"], "--compression auto chooses local:"),
        (["--algorithm", "pipe"], "16 steps, 6 of them delayed by one"),
    ],
    ids=["auto", "local", "pipe"],
)
def test_what_a_gpu_exchanges_is_not_measured(dadt_run, options: list[str], said: str) -> None:
    run = dadt_run(ON_A_DEVICE, *options, "--warmup-steps", "10", "--executor", "gloo", "--sync-every", "2")
    assert said in run.output and "warm-up done" not in run.output
    assert_replicas_equal(run)


@pytest.mark.slow
def test_local_is_what_it_is_by_its_name(dadt_run) -> None:
    torch.set_num_threads(1)
    options = ["--warmup-steps", str(WARMUP), "--sync-every", "4"]
    run = dadt_run(FAKE.format(exchanges=[1.0]) + APART, "--algorithm", "auto", *options)
    assert "--algorithm auto chooses local every 4 steps: " in run.output
    named = dadt_run(APART, "--algorithm", "local", *options)
    for mine, other in zip(run.ranks, named.ranks, strict=True):
        assert_equal(mine["own"], other["own"], "before the end")
        assert_equal(mine["end"], other["end"], "at the end")
    assert_equal(run.ranks[0]["end"], run.ranks[1]["end"], "replicas")
    assert not torch.equal(run.ranks[0]["own"]["0.weight"], run.ranks[1]["own"]["0.weight"])


TRAINED = """
    from harness import scenarios
    report(scenarios.train("{name}", rank))
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "train"),
    [
        (["--on-nan", "report"], "momentum"),
        (["--outer-momentum", "0.9"], "momentum"),
        ([], "adam"),
        ([], "frozen"),
    ],
)
def test_local_is_not_chosen(dadt_run, options: list[str], train: str) -> None:
    """Where it loses accuracy by the page of results, or ranks must be equal, or what is trained changes."""
    text = FAKE.format(exchanges=[0.015]) + TRAINED.format(name=train)
    run = dadt_run(text, "--algorithm", "auto", "--warmup-steps", "13" if train == "frozen" else "10", *options)
    assert "--algorithm auto chooses pipe: " in run.output
    assert_equal(*run.ranks, "replicas")


CHOSEN = """
    torch.manual_seed(rank)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.01)
    resumed = {resumed!r}
    if resumed:
        saved = torch.load(f"after{{resumed}}.pt", weights_only=True)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    for step in range(resumed, 44):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        if not resumed and step + 1 in (11, 15):
            torch.save([model.state_dict(), optimizer.state_dict()], f"after{{step + 1}}.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "way"), [("Adam", "pipe with int8"), ("SGD", "local with int4 every 8 steps")])
def test_what_a_checkpoint_says_of_the_choice(dadt_run, optimizer: str, way: str) -> None:
    """It counts, unless the user has given another compression since; and a choice that was not made yet is made."""

    def run(resumed: int, *options: str) -> tuple[int, str]:
        script = FAKE.format(exchanges=[0.020 if optimizer == "Adam" else 0.1]) + ON_TIME
        done = dadt_run(script + CHOSEN.format(resumed=resumed, optimizer=optimizer), *options)
        return done.output.count("auto chooses"), done.output

    said, output = run(0, *BOTH, "--warmup-steps", "12")
    assert said == 1 and f"auto chooses {way}: " in output
    said, output = run(15, *BOTH, "--warmup-steps", "12")
    assert said == 0
    assert "3.9x less" in output if optimizer == "Adam" else "29 steps, none delayed" in output
    said, output = run(15, "--algorithm", "auto", "--compression", "bf16", "--warmup-steps", "12")
    assert said == 0
    assert "2.0x less" in output if optimizer == "Adam" else "29 steps, none delayed" in output
    said, output = run(11, *BOTH, "--warmup-steps", "10")
    assert said == 1 and f"auto chooses {way}: " in output


@pytest.mark.parametrize(
    ("exchange", "meaning"),
    [
        (0.0066, "(66% of compute): communication is hidden; sync would be as fast here"),
        (0.0068, "(68% of compute): compute hides 100% of communication; sync would be slower"),
        (0.0160, "(160% of compute): compute hides 62% of communication; sync would be slower"),
        (0.0201, "(201% of compute): exchanges bound the speed: send fewer bytes (--compression int8)"),
    ],
)
def test_what_the_ratio_means(exchange, meaning) -> None:
    measure = Measure(Progress())
    measure.load_state({"compute": [0.5, 0.01, 0.01], "exchange": [exchange, exchange, 0.9]})
    assert meaning in measure.verdict(50, 2, measure.exchange)


def test_steps_that_one_worker_alone_does_faster_are_told(monkeypatch) -> None:
    def verdict(added: float, workers: int) -> str:
        """Steps compute for 0.4 ms, and are so much longer by hooks."""
        rank, now = Progress(), 0.0
        measure = Measure(rank)
        for _ in range(9):
            now += 0.0004 + added
            rank.hook_seconds += added
            monkeypatch.setattr("dadt.train.measure.perf_counter", lambda now=now: now)
            measure.stepped()
        return measure.verdict(9, workers, measure.exchange)

    told = (
        "one worker alone would be faster: it would compute for 0.80 ms on the 2 batches for which a step of 2 workers"
        " takes 1.1 ms"
    )
    assert told in verdict(0.0007, 2)
    assert "alone" not in verdict(0.0007, 4)
    assert "alone" not in verdict(0.0003, 2)


@pytest.mark.parametrize("asked", ["--algorithm", "--compression"])
def test_too_short_a_warm_up_to_measure(dadt_run, asked: str) -> None:
    run = dadt_run("", asked, "auto", "--warmup-steps", "3", code=None)
    assert run.code == 2
    assert run.lines()[-1].endswith(f"{asked} auto measures in the synchronous steps: give --warmup-steps 10 or more")


def test_a_compression_is_not_chosen_for_gossip(dadt_run) -> None:
    run = dadt_run("", "--algorithm", "gossip", "--compression", "auto", code=None)
    assert run.code == 2
    assert (
        "--compression auto: --algorithm gossip has no synchronous steps in which it could be measured;" in run.output
    )


LOSES = """
from dadt.algorithms.auto.auto import StepRecord
from dadt.algorithms.auto.choice import Times

def times(self, compute, alone, cores, *, may_part, backwards):
    exchange = {name: 1.0 / (i + 1) for i, name in enumerate(self._moving)}
    return Times(0.01, 0.01, 0.0, 1.0, exchange, exchange, dict.fromkeys(exchange, 0.0), may_part)
StepRecord.times = times
"""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("late", "what", "fault"), [(12, "times", "2:13:forward"), (12, "bucket", "2:13:forward"), (0, "", "2:30:forward")]
)
def test_a_rank_is_lost(launch, late: int, what: str, fault: str) -> None:
    """While the others tell each other their times, after that, or under `local`."""
    text = (
        script(KILL_ONCE_DELIVERED if what else "die_now")
        .replace("AdamW", "SGD")
        .replace("in (model, other)]", "in (model,)]")
    )
    text = text.replace("die_now", "os.kill(os.getpid(), signal.SIGKILL)")
    text = text.replace("\nstep = 0\n", LOSES + (lacks(late, what) if what else "") + "\nstep = 0\n")
    result = launch(text, *OPTIONS, *BOTH, "--sync-every", "8", "train.py", fault)
    assert result.code == 0, result.err
    assert survivors(result).keys() == {0, 1}
    assert "chooses local with int4 every 8 steps: " in result.err


@pytest.mark.slow
def test_a_compression_is_named_where_local_goes_on_from_before_the_choice(dadt_run) -> None:
    script = [CHOSEN.format(resumed=resumed, optimizer="SGD") for resumed in (0, 11)]
    dadt_run(script[0], "--algorithm", "local", "--compression", "auto", "--warmup-steps", "12")
    run = dadt_run(script[1], "--algorithm", "local", "--compression", "none", "--warmup-steps", "12")
    assert "each rank takes steps of its own" in run.output
