"""Ranks are weighed by what their losses are means over: `sync` then equals one process on the joint batch."""

from __future__ import annotations

from itertools import zip_longest

import pytest
import torch
from harness.checks import assert_equal, assert_near, assert_replicas_equal
from harness.counted_losses import AS_BEFORE, EXACT

ALL = """
    import gc
    from harness import counted_losses
    found = {}
    for name, train in {**counted_losses.EXACT, **counted_losses.AS_BEFORE}.items():
        found[name] = train()
        gc.collect()
    report(found)
"""
WEIGHED = "that count in a rank's loss are not in proportion to its samples"


@pytest.fixture(scope="module")
def by_samples(shared_run):
    return shared_run(ALL, "--algorithm", "sync", "--batch", "global", "--weigh", "samples")


@pytest.mark.parametrize("executor", ["shm", pytest.param("tcp", marks=pytest.mark.slow), "gloo"])
def test_sync_equals_one_process(dadt_run, by_samples, executor) -> None:
    torch.set_num_threads(1)
    run = dadt_run(ALL, "--algorithm", "sync", "--batch", "global", "--executor", executor)
    for name, train in EXACT.items():
        assert_equal(run.ranks[0][name], run.ranks[1][name], f"{name}: replicas")
        assert_near(run.ranks[0][name], train(), f"{name}: one process")
    for name in AS_BEFORE:
        assert_equal(run.ranks[0][name], run.ranks[1][name], f"{name}: replicas")
        if executor == "shm":
            assert_equal(run.ranks[0][name], by_samples.ranks[0][name], f"{name}: by samples")
    lines = run.lines()
    assert any(WEIGHED in line for line in lines), run.output
    assert any("is not one mean of cross_entropy" in line and "weighed by samples" in line for line in lines)


def test_by_samples_differs(by_samples) -> None:
    """By far more than rounding, or the comparison would show nothing."""
    torch.set_num_threads(1)
    for name, train in EXACT.items():
        one, ranks = train(), by_samples.ranks[0][name]
        assert max(float((one[key] - ranks[key]).abs().max()) for key in one) > 1e-3, name
    assert not any("--weigh" in line for line in by_samples.lines())


def test_late_averages_leave_replicas_equal(dadt_run) -> None:
    """Under `pipe`, which exchanges the first step again and later ones once."""
    run = dadt_run(ALL, "--batch", "global", "--warmup-steps", "4")
    for name in (*EXACT, *AS_BEFORE):
        assert_equal(run.ranks[0][name], run.ranks[1][name], name)
    assert any(WEIGHED in line for line in run.lines()) and " of them delayed by one" in run.output


UNEVEN = """
    from torch.nn import functional as F
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    # For each step, of each rank: how many targets count in each of its backwards.
    steps = [[(2,), (3, 5)], [(4, 1), (2,)], [(2, 2, 7), (6, 3)], [(1,), (1,)]]
    given = torch.Generator().manual_seed(1)
    taken = []
    for ranks in steps:
        drawn = [[(torch.randn(n, 4, generator=given), torch.randint(0, 3, (n,), generator=given)) for n in counts]
                 for counts in ranks]
        taken.append(drawn)
        for x, y in drawn[rank]:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    report({"state": model.state_dict(), "first": first, "taken": taken})
"""


def test_ranks_whose_steps_have_unequal_numbers_of_backwards(dadt_run) -> None:
    """A backward that only some ranks have is one over their targets alone."""
    run = dadt_run(UNEVEN, "--algorithm", "sync")
    assert_replicas_equal(run)
    model = torch.nn.Linear(4, 3)
    model.load_state_dict(run.ranks[0]["first"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for drawn in run.ranks[0]["taken"]:
        for backwards in zip_longest(*drawn):
            x, y = (torch.cat(parts) for parts in zip(*(each for each in backwards if each), strict=True))
            torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_near(run.ranks[0]["state"], model.state_dict(), "one process")


UNSEEN = """
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        x, y = torch.randn(3 + rank, 4), torch.randint(0, 3, (3 + rank,))
        loss = nn.functional.cross_entropy(model(x), y)
        if rank == step % 2:
            for p, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
                p.grad = gradient
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report({"state": model.state_dict()})
"""


@pytest.mark.parametrize(("algorithm", "np"), [("sync", 3), ("pipe", 2)])
def test_ranks_agree_where_one_has_no_backward(dadt_run, algorithm, np) -> None:
    assert_replicas_equal(dadt_run(UNSEEN, "--algorithm", algorithm, np=np))


BY_ITSELF = """
    import torch.distributed as dist
    from harness import counted_losses
    dist.init_process_group("gloo")
    mine = slice(dist.get_rank(), 42, 2)
    torch.manual_seed(0)
    tokens, labels = counted_losses.padding()
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for x, y in zip(tokens[mine].split(4), labels[mine].split(4)):
        counted_losses.mean(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    report({"state": model.state_dict()})
"""


def test_a_script_that_has_a_process_group_is_left_as_it_is(dadt_run) -> None:
    by_default = dadt_run(BY_ITSELF, "--algorithm", "sync")
    assert not any("--weigh" in line for line in by_default.lines())
    asked = dadt_run(BY_ITSELF, "--algorithm", "sync", "--weigh", "tokens")
    assert_replicas_equal(by_default)
    assert_replicas_equal(asked)
    assert any("--weigh tokens: " in line and WEIGHED in line for line in asked.lines())
    assert not torch.equal(asked.ranks[0]["state"]["1.bias"], by_default.ranks[0]["state"]["1.bias"])


RESUMED = """
    import gc, io
    from torch.nn import functional as F
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
        return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    def train(model, optimizer, backwards, steps):
        for step in steps:
            given = torch.Generator().manual_seed(10 * step + rank)
            for _ in range(backwards):
                tokens = torch.randint(0, 9, (4, 8), generator=given)
                labels = tokens.masked_fill(torch.rand(4, 8, generator=given) < 0.2 + 0.6 * rank, -100)
                F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items()}
    def trained(backwards):
        saved, (model, optimizer) = io.BytesIO(), make()
        train(model, optimizer, backwards, range(9))
        torch.save([model.state_dict(), optimizer.state_dict()], saved)
        whole = train(model, optimizer, backwards, range(9, 14))
        del model, optimizer
        gc.collect()
        again = make()
        for part, state in zip(again, torch.load(io.BytesIO(saved.getvalue()), weights_only=True)):
            part.load_state_dict(state)
        return {"whole": whole, "resumed": train(*again, backwards, range(9, 14))}
    found = []
    for backwards in (1, 2):
        found.append(trained(backwards))
        gc.collect()
    report(found)
"""


@pytest.mark.parametrize("algorithm", ["sync", "pipe"])
def test_a_resumed_training_weighs_as_before(dadt_run, algorithm) -> None:
    """From the first step on, in new objects, as in a new process: late averages tell what ranks count a step late."""
    run = dadt_run(RESUMED, "--algorithm", algorithm, "--warmup-steps", "4", "--weigh", "tokens")
    for one, other in zip(*run.ranks, strict=True):
        assert_equal(one["whole"], other["whole"], "replicas")
        for found in (one, other):
            assert_equal(found["whole"], found["resumed"], "resumed")
    assert any(WEIGHED in line for line in run.lines()), run.output
