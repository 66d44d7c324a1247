"""In a script that calls `dadt.init()`, each rank draws random numbers of its own from the first step on."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.job import run_api as run

DRAWS = """
    import random
    import numpy as np
    from torch.utils.data import DataLoader

    def draws():
        return [torch.rand(()).item(), np.random.rand(), random.random()]

    class Noise(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.rand(())

    {before}
    dadt.init(algorithm="sync")
    {after}
    first = draws()
    net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout(0.5))
    weight = net[0].weight.detach().clone()
    workers = [batch.item() for batch in DataLoader(Noise(), num_workers=1)]
    at_init = torch.rand(()).item()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if {wrap}:
        optimizer = dadt.DistributedOptimizer(optimizer)
    out = net(torch.ones(1, 4))
    mask = (out == 0).flatten().tolist()
    out.sum().backward()
    optimizer.step()
    report({{"first": first, "weight": weight.tolist(), "workers": workers, "ahead": at_init, "mask": mask,
            "then": draws()}})
"""


def script(before: str = "", after: str = "", wrap: bool = True) -> str:
    return DRAWS.format(before=before, after=after, wrap=wrap)


def test_ranks_begin_alike_and_part_at_the_first_step(tmp_path: Path) -> None:
    """The job's seed gives each rank's numbers again; one of the script's before dadt.init() is for all ranks."""
    again = []
    for before in ("", "torch.manual_seed(3), np.random.seed(3), random.seed(3)"):
        (tmp_path / str(len(again))).mkdir()
        a, b = run(tmp_path / str(len(again)), script(before), "--seed", "11").ranks
        for same in ("first", "weight", "ahead"):
            assert a[same] == b[same]
        assert a["workers"] != b["workers"]
        assert a["mask"] != b["mask"]
        assert all(mine != other for mine, other in zip(a["then"], b["then"], strict=True))
        again.append([a, b])
    assert again[0] != again[1]
    assert run(tmp_path, script(), "--seed", "11").ranks == again[0]


def test_ranks_part_at_the_first_step_of_an_optimizer_that_is_not_wrapped(tmp_path: Path) -> None:
    a, b = run(tmp_path, script(wrap=False)).ranks
    for same in ("first", "weight", "ahead", "mask"):
        assert a[same] == b[same]
    assert all(mine != other for mine, other in zip(a["then"], b["then"], strict=True))


@pytest.mark.parametrize("kind", [0, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (1, 2))])
def test_a_generator_that_the_script_seeds_after_init_stays_as_it_is(tmp_path: Path, kind: int) -> None:
    """Of the three each by itself: also with the job's own seed, which leaves no trace in the generator."""
    seeding = ("torch.manual_seed(11)", "np.random.seed(5)", "random.seed(5)")[kind]
    a, b = run(tmp_path, script(after=seeding), "--seed", "11").ranks
    assert [mine == other for mine, other in zip(a["then"], b["then"], strict=True)] == [k == kind for k in range(3)]
    assert (a["mask"] == b["mask"], a["workers"] == b["workers"]) == (kind == 0, kind == 0)


@pytest.mark.slow
def test_a_seed_that_the_script_takes_back_leaves_the_ranks_to_part(tmp_path: Path) -> None:
    a, b = run(tmp_path, script(after="with torch.random.fork_rng(): torch.manual_seed(5), torch.rand(3)")).ranks
    assert a["first"] == b["first"]
    assert all(mine != other for mine, other in zip(a["then"], b["then"], strict=True))


@pytest.mark.slow
def test_without_seeding_and_alone_nothing_is_touched(tmp_path: Path) -> None:
    after = "torch.manual_seed(5); np.random.seed(5); random.seed(5)"
    (alone,) = run(tmp_path, script(after=after), launcher="python", np=1).ranks
    a, b = run(tmp_path, script(after=after), "--no-seeding").ranks
    assert a == b == alone


SHUFFLED = """
    from torch.utils.data import DataLoader
    dadt.init(algorithm="sync")
    {after}
    ahead = torch.rand(()).item()
    order = [sample.item() for sample in DataLoader(torch.arange(64), shuffle=True, batch_size=None)]
    report((ahead, order))
"""


def test_ranks_part_at_the_first_order_that_is_drawn(tmp_path: Path) -> None:
    """Or all of them would go through the same samples until the first step."""
    (mine, a), (other, b) = run(tmp_path, SHUFFLED.format(after="")).ranks
    assert mine == other and a != b and sorted(a) == sorted(b) == list(range(64))
    (mine, a), (other, b) = run(tmp_path, SHUFFLED.format(after="torch.manual_seed(5)")).ranks
    assert mine == other and a == b
