"""What training holds beside the script's own tensors, counted in bytes."""

from __future__ import annotations

import pytest
from harness.checks import assert_replicas_equal

COUNT = """
    import gc
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    optimizer = {optimizer}
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    def held():
        gc.collect()
        tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
        storages = {{t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}}
        return sum(storages.values()) / size
    for step in range(24):
        optimizer.zero_grad({zero})
        model(torch.randn(2, 256)).pow(2).mean().backward()
        gradients = [p.grad for p in model.parameters()]
        most = held()  # all gradients are there, and the exchange of the last step has its memory
        del gradients
        optimizer.step()
        schedule.step()
        left = held()
    state = sum(t.numel() * 4 for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)) / size
    report({{"beside": most - 2 - state, "between": left - 2 - state, "state": model.state_dict()}})
"""
SGD = "torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)"
ADAM = "torch.optim.AdamW(model.parameters(), lr=1e-4)"


# In units of the weights, beside these, gradients and optimizer state: averages of two steps, predicted weights, and
# the gradients under way. Where gradients are set to zero in place, they are in the memory of averages, and copied
# twice.
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("options", "optimizer", "zero", "most"),
    [
        ("--algorithm pipe", SGD, "", 4.1),
        ("--algorithm pipe", ADAM, "", 4.1),
        ("--algorithm pipe --executor tcp", SGD, "", 4.1),
        ("--algorithm pipe", SGD, "set_to_none=False", 4.1),
        ("--algorithm sync", SGD, "", 1.1),
        ("--algorithm sync --executor tcp", SGD, "", 1.1),
        ("--algorithm sync", SGD, "set_to_none=False", 1.1),
        # Residuals, and the second moments of the rank's own gradients; with `pipe` its momentum under way, too.
        ("--algorithm sync --compression momentum:1", ADAM, "", 3.2),
        ("--algorithm sync --compression momentum:1", SGD, "", 2.2),
        ("--algorithm pipe --compression momentum:1", ADAM, "", 7.2),
        ("--algorithm sync --compression int4", ADAM, "", 2.1),
    ],
)
def test_few_copies_of_the_weights_are_held(dadt_run, options: str, optimizer: str, zero: str, most: float) -> None:
    run = dadt_run(COUNT.format(optimizer=optimizer, zero=zero), *options.split(), "--warmup-steps", "4")
    assert_replicas_equal(run)
    for rank in run.ranks:
        assert most - 1 < rank["beside"] < most


def test_gradients_that_were_sent_ahead_of_a_step_do_not_outlast_it(dadt_run) -> None:
    """The next forward would run beside them, and most of a training's memory is what it keeps."""
    run = dadt_run(COUNT.format(optimizer=SGD, zero=""), "--algorithm", "sync", "--bucket-mb", "0.5")
    assert_replicas_equal(run)
    for rank in run.ranks:
        assert rank["between"] < 0.1


KEPT = """
    from harness.scenarios import batch
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def kept(keep):
        same, before = True, None
        for step in range(8):
            x, y = batch(rank, step, 0)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            same &= before is None or all(map(torch.equal, *before))
            mine = [keep(p.grad) for p in model.parameters()]
            before = mine, [g.clone() for g in mine]
        return bool(same)
    report({"kept": [kept(lambda g: g), kept(lambda g: g.detach())], "state": model.state_dict()})
"""


def test_averages_that_the_script_keeps_are_not_overwritten_in_the_next_step(dadt_run) -> None:
    """`sync` has one place for them as long as nobody looks at it."""
    run = dadt_run(KEPT, "--algorithm", "sync", "--bucket-mb", "0.0001")
    assert_replicas_equal(run)
    for rank in run.ranks:
        assert rank["kept"] == [True, True]
