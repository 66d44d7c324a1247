"""`--batch speed`: ranks get samples in proportion to what they train on in a second."""

from __future__ import annotations

import itertools
import random

import pytest
from harness.checks import assert_equal

from dadt.config import Config
from dadt.errors import ConfigError
from dadt.inject.data.share import Batches, PerRank, portion_by

SCRIPT = """
    import time
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
    torch.manual_seed(3)
    x, y = torch.randn(40 * 24 + 7, 6), torch.randint(0, 3, (40 * 24 + 7,))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.arange(len(x)), x, y)
    size = 24 // int(os.environ.get("WORLD_SIZE", "1"))
    sampler = BatchSampler(RandomSampler(data), size, False) if "{kind}" == "batches" else None
    if sampler is None:
        loader = DataLoader(data, batch_size=size, shuffle=True, num_workers=2 * ("{kind}" == "workers"))
    else:
        loader = DataLoader(data, batch_sampler=type("Own", (BatchSampler,), {{}})(RandomSampler(data), size, False))
    seen = []
    for epoch in range(3):
        for which, inputs, targets in loader:
            seen += [(epoch, int(each)) for each in which]
            time.sleep(len(which) * (0.004 if int(os.environ.get("DADT_RANK", "0")) else 0.0004))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    report(dict(model=model.state_dict(), seen=seen, steps=len(loader)))
"""

MORE = 1.1
"""How many times the samples of the slow rank the fast one sees at least. It would be 3 to 10 on a machine that does
nothing else: what else it does takes both ranks the same time. With equal parts it is 1."""


def test_each_position_is_one_ranks() -> None:
    draw = random.Random(1)
    for _ in range(2000):
        size = draw.randrange(1, 9)
        speeds = [draw.random() ** 3 + 1e-9 for _ in range(size)]
        fractions = [each / sum(speeds) for each in speeds]
        least = draw.randrange(3)
        total = least * size + draw.randrange(200)
        parts = [portion_by(fractions, total, rank, least) for rank in range(size)]
        assert list(itertools.chain(*parts)) == list(range(total))
        assert all(len(each) >= least for each in parts)
        if least == 0:
            assert all(abs(len(each) - total * f) <= 1 for each, f in zip(parts, fractions, strict=True))


@pytest.mark.parametrize("kind", [PerRank, Batches])
def test_parts_may_change_in_the_midst_of_a_pass(kind: type) -> None:
    """Each step has the same samples as with equal parts, and all ranks as many steps."""

    def shares(rank: int, *, by_speed: bool) -> list[tuple[list[int], int]]:
        changing = itertools.chain([()] * 2, [(0.2, 0.8)] * 2, itertools.repeat((0.75, 0.25)))
        fractions = (lambda: next(changing)) if by_speed else tuple
        batches = [list(range(i, min(i + 8, 93))) for i in range(0, 93, 8)]
        given = (range(93), 8, False, rank, 2, 2) if kind is PerRank else (batches, rank, 2, 2)
        return [(each.index, each.samples) for each in kind(*given, fractions)]

    steps = list(zip(shares(0, by_speed=True), shares(1, by_speed=True), strict=True))
    equal = list(zip(shares(0, by_speed=False), shares(1, by_speed=False), strict=True))
    assert [one[0] + other[0] for one, other in steps] == [one[0] + other[0] for one, other in equal]
    assert [one[1] for one, _ in steps] == [8, 8, 3, 3, 12, 10]


@pytest.mark.parametrize(
    "kind", ["workers", *(pytest.param(each, marks=pytest.mark.slow) for each in ("plain", "batches"))]
)
def test_the_fast_rank_gets_more_and_weights_are_those_of_one_process(dadt_run, kind: str) -> None:
    script = SCRIPT.format(kind=kind)
    alone = dadt_run(script, "--seed", "7", np=1).ranks[0]
    run = dadt_run(script, "--seed", "7", "--algorithm", "sync", "--batch", "speed")
    fast, slow = run.ranks
    assert_equal(fast["model"], slow["model"], "replicas")
    assert sorted(fast["seen"] + slow["seen"]) == sorted(alone["seen"])
    assert fast["steps"] == slow["steps"] == alone["steps"]
    for name, value in alone["model"].items():
        assert (value - fast["model"][name]).abs().max() < 1e-5, name
    assert len(fast["seen"]) > MORE * len(slow["seen"])
    assert "--batch speed: of each step's samples ranks get" in run.output


@pytest.mark.slow
def test_late_averages(dadt_run) -> None:
    run = dadt_run(SCRIPT.format(kind="plain"), "--warmup-steps", "30", "--batch", "speed")
    assert_equal(run.ranks[0]["model"], run.ranks[1]["model"], "replicas")
    assert len(run.ranks[0]["seen"]) > MORE * len(run.ranks[1]["seen"])


@pytest.mark.slow
def test_streams_are_divided_equally_and_a_line_says_so(dadt_run) -> None:
    run = dadt_run(
        """
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(torch.randn(400, 6, generator=torch.Generator().manual_seed(1)))
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        count = 0
        for x in torch.utils.data.DataLoader(Stream(), batch_size=4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            count += len(x)
        report(dict(count=count))
        """,
        "--batch",
        "speed",
    )
    assert [each["count"] for each in run.ranks] == [200, 200]
    assert "--batch speed divides no streams, groups and single items: ranks get as many" in run.output


SMALL_MEMORY = """
    import resource
    from torch.utils.data import DataLoader, TensorDataset
    rank = int(os.environ.get("DADT_RANK", "0"))
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3)
    data = TensorDataset(torch.arange(320), torch.randn(320, 6), torch.randint(0, 3, (320,)))
    loader = DataLoader(data, batch_size=32, shuffle=True)
    optimizer.zero_grad()
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    seen, sizes = [], set()
    for epoch in range(2):
        for which, x, y in loader:
            if rank == 1 and not seen:
                resource.setrlimit(resource.RLIMIT_AS, (used + (600 << 20), resource.RLIM_INFINITY))
            sizes.add(len(which))
            seen += [(epoch, int(each)) for each in which]
            torch.empty(len(which), 6 << 20)  # 24 MiB a sample
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    report(dict(model=model.state_dict(), seen=seen, sizes=sizes, steps=len(loader)))
"""


def test_a_rank_without_enough_memory_trains_on_smaller_batches(dadt_run) -> None:
    run = dadt_run(SMALL_MEMORY, "--batch", "memory", "--algorithm", "sync")
    enough, small = run.ranks
    assert "worker 1 has run out of memory: the job begins again, and it trains on 1/2 of the script's" in run.output
    assert_equal(enough["model"], small["model"], "replicas")
    assert max(enough["sizes"]) == 32 and max(small["sizes"]) == 16
    assert sorted(enough["seen"] + small["seen"]) == [(epoch, each) for epoch in range(2) for each in range(320)]
    assert enough["steps"] == small["steps"] == 7


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"algorithm": "local"}, "--algorithm local"),
        ({"algorithm": "auto"}, "--algorithm auto"),
        ({"island": "host"}, "--island host"),
        ({"redistribute": True, "min_np": 1}, "--redistribute"),
        ({"snapshot_every": "30s"}, "--snapshot-every 30s"),
    ],
)
def test_what_does_not_go_with_it_is_said(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=f"--batch speed: {named} does not know parts of different sizes"):
        Config(batch="speed", **settings)


@pytest.mark.slow
def test_the_part_of_a_lost_rank_is_left_out(dadt_run) -> None:
    step = "            optimizer.zero_grad()\n"
    end = "            if epoch == 1 and os.environ['DADT_RANK'] == '1':\n                os._exit(1)\n"
    script = SCRIPT.format(kind="plain").replace(step, end + step)
    run = dadt_run(script, "--algorithm", "sync", "--batch", "speed", "--min-np", "1", np=3, code=None)
    assert len(run.ranks) == 2, run.output
    assert_equal(run.ranks[0]["model"], run.ranks[1]["model"], "replicas")
    assert "2 of 3 workers train on" in run.output
