"""DistributedOptimizer: the optimizers that a script wraps train together, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from harness.job import run_api as run

TRAIN = """
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, TensorDataset
    dadt.init({knobs})
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(48, 5), torch.randn(48, 2))
    torch.manual_seed(10 + dadt.rank())
    net = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    own = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9)
    wrapped = dadt.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    assert wrapped is optimizer and isinstance(wrapped, torch.optim.SGD)
    wrapped.add_param_group({{"params": list(net[2].parameters()), "lr": 0.05}})
    other = torch.optim.SGD(own.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    sampler = dadt.DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    everything = DataLoader(data, batch_size=12, shuffle=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for features, labels in loader:
            wrapped.zero_grad()
            loss = F.mse_loss(net(features), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(wrapped)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(wrapped)
            scaler.update()
            other.zero_grad()
            own(labels).sum().mul(dadt.rank() + 1).backward()
            other.step()
        scheduler.step()
    torch.save(dadt.rank(), f"mine{{dadt.rank()}}.pt")
    report([net.state_dict(), wrapped.state_dict(), own.weight.detach().clone(), own.weight.grad.clone(),
            [len(loader), len(everything), sum(len(b[0]) for b in everything)], wrapped.param_groups[1]["lr"]])
    dadt.shutdown()
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process that sees both ranks' batches at once, from rank 0's weights."""
    script = TRAIN.format(knobs="").replace("batch_size=4, sampler=sampler", "batch_size=8, sampler=both")
    script = script.replace(
        "loader =", "both = [i for b in range(6) for r in (0, 1) for i in range(8*b+r, 8*b+8, 2)]\n    loader ="
    )
    return run(tmp_path_factory.mktemp("alone"), script, launcher="python", np=1).ranks[0]


@pytest.mark.parametrize("launcher", ["dadt run", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_sync_is_as_one_process(tmp_path, alone, launcher) -> None:
    done = run(tmp_path, TRAIN.format(knobs='algorithm="sync"'), launcher=launcher)
    first, second = done.ranks
    for name, weight in first[0].items():
        assert torch.equal(weight, second[0][name])
        torch.testing.assert_close(weight, alone[0][name], rtol=1e-5, atol=1e-6)
    assert "36 steps, none" in done.output  # both optimizers'
    for rank, each in enumerate(done.ranks):
        assert each[4] == [6, 4, 48]
        assert each[5] == pytest.approx(0.05 * 0.5)
        assert each[1]["state"].keys() == {0, 1, 2, 3}
        assert (tmp_path / f"mine{rank}.pt").exists()
    # What is not wrapped is each rank's own: its gradient is no average.
    assert not torch.equal(first[2], second[2])
    assert not torch.allclose(first[3], second[3])
    assert "DataLoader" not in done.output


def test_pipe_delays_and_replicas_are_equal(tmp_path) -> None:
    done = run(tmp_path, TRAIN.format(knobs="warmup_steps=2"))
    first, second = done.ranks
    for name, weight in first[0].items():
        assert torch.equal(weight, second[0][name])
    assert "of them delayed by one" in done.output


SUMS = """
    dadt.init(algorithm="sync")
    weight = torch.nn.Parameter(torch.zeros(3) + dadt.rank())
    optimizer = dadt.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), reduction="sum")
    for step in range(2):
        optimizer.zero_grad()
        (weight * (dadt.rank() + 1)).sum().backward()
        optimizer.step()
    searched = torch.nn.Parameter(torch.ones(1))
    search = torch.optim.LBFGS([searched], lr=1.0, max_iter=1)
    for _ in range(2):
        dadt.DistributedOptimizer(search, reduction="sum")
    def closure():
        search.zero_grad()
        loss = (searched * (dadt.rank() + 1)).sum()
        loss.backward()
        return loss
    total = search.step(closure)
    try:
        dadt.DistributedOptimizer(weight)
    except TypeError as error:
        report([weight.detach(), str(error), float(total), float(searched.grad)])
"""


@pytest.mark.parametrize(("launcher", "np"), [("dadt run", 2), ("python", 1)])
def test_sums(tmp_path, launcher, np) -> None:
    done = run(tmp_path, SUMS, launcher=launcher, np=np)
    factors = np * (np + 1) / 2
    for weight, error, total, gradient in done.ranks:
        assert weight.tolist() == [-2.0 * factors] * 3
        assert [total, gradient] == [factors, factors]  # of the closure, though wrapped twice
        assert error == "DistributedOptimizer: give a torch.optim.Optimizer, not Parameter"


@pytest.mark.slow
def test_init_after_training_has_begun_is_refused(tmp_path) -> None:
    script = """
        net = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        dadt.init()
    """
    done = run(tmp_path, script, code=1)
    assert "dadt.init() comes too late, training has begun: call it at the top of the script" in done.output
