"""Ranks that take steps of their own and average now and then: equal to the definition, bit for bit."""

from __future__ import annotations

import pytest
import torch
from harness.checks import assert_equal
from harness.kinds import KINDS, simulate_kind
from harness.rounds import SAVED, STEPS, WARMUP, Outer, averages, ranks, simulate, values

from dadt.algorithms.local.pace import overlap_of, steps_of
from dadt.config import Config
from dadt.errors import ConfigError

SCRIPT = """
    from harness import rounds as t
    torch.manual_seed(rank)                                    # rank 0's weights are everybody's
    model = t.mlp()
    optimizer = t.optimizer(model)
    for step in range(t.STEPS):
        t.backward(model, rank, step)
        t.lower(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    own = t.values(model)
    t.at_the_end(lambda: report({"own": own, "end": t.values(model)}))
"""


LOCAL_SGD = Outer()
DILOCO = Outer(every=3, lr=0.7, momentum=0.9)
STREAMING = Outer(every=5, lr=0.7, momentum=0.9, fragments=((0,), (1, 2, 3)), overlap=3)
AT_ONCE = Outer(every=3, lr=0.7, momentum=0.9, overlap=0)
A_ROUND_LATE = Outer(every=3, overlap=3)


@pytest.mark.parametrize(
    ("outer", "world", "options"),
    [
        (LOCAL_SGD, 2, ["--executor", "gloo"]),
        (DILOCO, 2, ["--bucket-mb", "0.0001"]),
        (STREAMING, 3, []),
        (AT_ONCE, 2, []),
        (A_ROUND_LATE, 2, []),
    ],
    ids=["local SGD, gloo", "DiLoCo, many buckets", "streaming, 3 ranks", "merged at once", "merged a round late"],
)
def test_each_rank_equals_the_definition(dadt_run, outer, world, options) -> None:
    torch.set_num_threads(1)
    run = dadt_run(SCRIPT, *outer.options(), *options, np=world)
    own = simulate(world, outer)
    for rank in range(world):
        assert_equal(run.ranks[rank]["own"], own[rank], f"rank {rank}")
        assert_equal(run.ranks[rank]["end"], averages(own)[rank], f"rank {rank}, at the end")
    merged = outer.overlap == 0 and (STEPS - WARMUP) % outer.every == 0
    assert torch.equal(own[0]["0.weight"], own[1]["0.weight"]) == merged
    assert any(f"every {outer.every} steps" in line for line in run.lines())


def test_progress_of_low_rank(dadt_run) -> None:
    outer = Outer(every=3)
    run = dadt_run(SCRIPT, *outer.options(), "--executor", "gloo", "--compression", "powersgd:1")
    assert_equal(run.ranks[0]["end"], run.ranks[1]["end"])
    assert not torch.equal(run.ranks[0]["own"]["0.weight"], run.ranks[1]["own"]["0.weight"])
    assert "less than uncompressed" in run.output
    expected = averages(simulate(2, outer))[0]
    far, size = (
        torch.cat([each.flatten() for each in values]).norm()
        for values in ([run.ranks[0]["end"][name] - value for name, value in expected.items()], expected.values())
    )
    assert 0 < far / size < 0.35  # after 6 rounds, with matrices of rank 1


ALL_KINDS = """
    from harness import kinds, rounds as t
    made, own = {}, {}
    for name, kind in kinds.KINDS.items():
        torch.manual_seed(0)
        made[name] = kind(rank)
        for _ in made[name][2]:
            pass
        own[name] = t.values(made[name][0])
    torch.manual_seed(0)
    collected, _, steps = kinds.accumulating(rank)
    for _ in steps:
        pass
    del _, steps
    t.at_the_end(lambda: report({
        "own": own,
        "end": {name: t.values(model) for name, (model, *_) in made.items()},
        "collected": t.values(collected),
    }))
"""


def test_what_scripts_do_equals_the_definition(dadt_run) -> None:
    torch.set_num_threads(1)
    outer = Outer(every=4, lr=0.7, momentum=0.9)
    options = ["--algorithm", "local", "--warmup-steps", "0", "--sync-every", "4", "--overlap-steps", "2"]
    run = dadt_run(ALL_KINDS, *options, "--outer-lr", "0.7", "--outer-momentum", "0.9")
    for name in KINDS:
        own = simulate_kind(name, 2, outer)
        for rank in range(2):
            assert_equal(run.ranks[rank]["own"][name], own[rank], f"{name}, rank {rank}")
            assert_equal(run.ranks[rank]["end"][name], averages(own)[rank], f"{name}, rank {rank}, at the end")
        assert not torch.equal(*[each[n] for each in own for n in list(own[0])[:1]]), name
    for rank, each in enumerate(run.ranks):
        assert_equal(each["collected"], each["own"]["accumulating"], f"without its optimizer, rank {rank}")


RESUMED = """
    import os
    from harness import rounds as t
    torch.manual_seed(rank)
    model = t.mlp()
    optimizer = t.optimizer(model)
    first, last = 0, t.SAVED
    if os.path.exists({path!r}):
        saved = torch.load({path!r}, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first, last = t.SAVED, t.STEPS
    for step in range(first, last):
        t.backward(model, rank, step)
        t.lower(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    own = t.values(model)
    if not first:
        torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, {path!r})
    report(own)
"""


def test_a_resumed_training_goes_on_from_one_ranks_view(dadt_run, tmp_path) -> None:
    torch.set_num_threads(1)
    script = RESUMED.format(path=str(tmp_path / "saved.pt"))
    outer = Outer(every=4, lr=0.7, momentum=0.9)
    before = ranks(2).train(outer, range(SAVED))
    assert before.rounds.flying
    for run, expected in (
        (dadt_run(script, *outer.options()), before),
        (dadt_run(script, *outer.options()), before.resumed(outer).train(outer, range(SAVED, STEPS))),
    ):
        for rank in range(2):
            assert_equal(run.ranks[rank], values(expected.models[rank]), f"rank {rank}")


THAWED = """
    import gc
    from harness import rounds as t
    gc.disable()

    def train():
        torch.manual_seed(0)
        model = t.mlp()
        optimizer = t.optimizer(model)
        model[0].requires_grad_(False)
        for step in range(7):
            t.backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        model[0].requires_grad_(True)
        saved = optimizer.state_dict()["dadt"]["state"]
        optimizer.load_state_dict(optimizer.state_dict())
        for step in range(7, 9):
            t.backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.itself = optimizer                    # garbage that only the collector finds
        return model, saved

    model, saved = train()
    (runtime,) = [o for o in gc.get_objects() if type(o).__name__ == "Runtime"]
    wait = runtime.ranks.wait

    def collect_and_wait(work):
        gc.collect()
        wait(work)

    runtime.ranks.wait = collect_and_wait
    t.at_the_end(lambda: report([sorted(saved["anchors"]), t.values(model)]))
"""


def test_what_is_thawed_just_now_is_saved_and_garbage_at_the_end_harms_nobody(dadt_run) -> None:
    options = ["--algorithm", "local", "--warmup-steps", "0", "--sync-every", "4", "--outer-momentum", "0.9"]
    (anchors, one), (_, other) = dadt_run(THAWED, *options).ranks
    assert anchors == [2, 3]
    assert_equal(one, other, "the last average")


MIDDLE = """
    import gc
    from harness import rounds as t
    torch.manual_seed(0)
    model = t.mlp()
    optimizer = t.optimizer(model)
    (runtime,) = [o for o in gc.get_objects() if type(o).__name__ == "Runtime"]

    def train(first, last, optimizer):
        for step in range(first, last):
            t.backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()

    def look():
        a = next(iter(runtime.attachments))
        rows = [row for fragment in a.algorithm._fragments.values() for row in fragment.rows.values()]
        anchors = {str(i): row.anchor.clone() for i, row in enumerate(rows)}
        return anchors, t.values(model), sum(len(bucket.flats) for bucket in a.schema.buckets)

    train(0, 9, optimizer)                                  # an average is under way
    optimizer.load_state_dict(optimizer.state_dict())       # of which each rank knows its own part
    train(9, 21, optimizer)
    before = look()
    optimizer = None                                        # collected before the next one is attached
    train(21, 22, torch.optim.SGD(model.parameters(), lr=0.0))
    report([before, t.values(model)])
"""


def test_what_scripts_do_in_the_middle_of_a_round(dadt_run) -> None:
    options = ["--algorithm", "local", "--warmup-steps", "3", "--sync-every", "4", "--outer-momentum", "0.9"]
    runs = dadt_run(MIDDLE, *options).ranks
    (before, own, buffers), (_, other, _) = (run[0] for run in runs)
    assert_equal(before, runs[1][0][0], "anchors, after each rank has loaded a state of its own")
    assert buffers == 0, "gradients are not sent any more"
    assert not torch.equal(own["0.weight"], other["0.weight"])
    # A new optimizer begins with the same weights on all ranks, and nobody's work is lost.
    assert_equal(runs[0][1], runs[1][1], "after the first step of another optimizer")
    for name, value in runs[0][1].items():
        torch.testing.assert_close(value, (own[name] + other[name]) / 2, msg=name)


SCHEDULED = """
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(24):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (0.99 if rank == 0 else 0.98) ** step     # a scheduler loaded on rank 0 alone
        loss = model(torch.randn(16, 6)).square().mean()
        if step == 14 and rank == 1:
            loss = loss * float("inf")                                      # which only this rank leaves out
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    report([scaler.get_scale(), optimizer.param_groups[0]["lr"]])
"""


def test_rates_that_differ_and_a_step_that_one_rank_leaves_out(dadt_run) -> None:
    options = ["--algorithm", "local", "--warmup-steps", "6", "--sync-every", "8"]
    run = dadt_run(SCHEDULED, *options)
    assert [scale for scale, _ in run.ranks] == [4.0, 2.0]
    assert "rank 0's are used on all" in run.output


BEHIND = """
    import pathlib
    from harness import rounds as t
    from harness.patience import await_that
    model = t.mlp()
    optimizer = t.optimizer(model)
    ahead = pathlib.Path("ahead")
    for step in range(20):
        t.backward(model, rank, step)
        if rank == 1 and step == 7:                     # the last one of the first round
            await_that(ahead.exists, "rank 0, which waits for this rank")
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step == 10:                    # half a round later, but for one step
            ahead.touch()
    report(ahead.exists())
"""


def test_a_rank_goes_on_while_another_has_yet_to_send(dadt_run) -> None:
    run = dadt_run(BEHIND, "--algorithm", "local", "--warmup-steps", "0", "--sync-every", "8")
    assert run.ranks == [True, True]


LONG = """
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    large = torch.rand(800, 800)
    found = []
    for step in range(40):
        large @ large                                   # takes far longer than to average 21 numbers
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(2 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(model.weight.detach().clone())
    report(found)
"""


def test_a_mean_is_merged_as_soon_as_the_one_before_it_had_come(dadt_run) -> None:
    one, other = dadt_run(LONG, "--algorithm", "local", "--warmup-steps", "0", "--sync-every", "8").ranks
    equal = [step for step, (a, b) in enumerate(zip(one, other, strict=True), 1) if torch.equal(a, b)]
    # The first two means are merged half a round late: nothing is known of the first yet when the second is sent.
    assert equal == [24, 32, 40]


def test_steps_that_an_exchange_takes() -> None:
    found = [overlap_of(exchange, step=1.0, every=8) for exchange in (0.1, 0.5, 1.0, 1.1, 3.9, 40.0)]
    assert found == [0, 1, 1, 2, 4, 4]
    assert overlap_of(1.0, step=0.0, every=5) == 3, "nothing is known of the steps yet"


def test_steps_that_hide_an_exchange() -> None:
    assert [steps_of(exchange, step=1.0) for exchange in (0.0, 0.1, 1.0, 1.1, 3.9, 40.0)] == [1, 1, 1, 3, 7, 79]


def test_rounds_as_short_as_hide_an_exchange(dadt_run) -> None:
    """Steps last longer here than exchanges, so that rounds have one step."""
    run = dadt_run(LONG, "--algorithm", "local", "--warmup-steps", "0", "--sync-every", "auto", "--overlap-steps", "0")
    one, other = run.ranks
    equal = [torch.equal(a, b) for a, b in zip(one, other, strict=True)]
    assert equal[0] and sum(equal) > len(equal) // 2
    assert "averaged as often as steps hide that" in run.output


def test_settings_that_take_words_take_numbers_too() -> None:
    """As `dadt.run(function, sync_every=8)` gives them."""
    config = Config(sync_every=8, overlap_steps=2, island=2)  # type: ignore[arg-type]
    assert (config.sync_every, config.overlap_steps, config.island) == ("8", "2", "2")


def test_a_round_that_is_none_is_refused() -> None:
    for text in ("0", "-1", "1.5", "half"):
        with pytest.raises(ConfigError, match=r"--sync-every .*: give auto, or a number of 1 or more"):
            Config(sync_every=text)
    with pytest.raises(ConfigError, match="--overlap-steps 3: with --sync-every auto give auto or 0"):
        Config(sync_every="auto", overlap_steps="3")


def test_an_overlap_that_is_none_is_refused() -> None:
    for text in ("-1", "33", "1.5", "half"):
        with pytest.raises(ConfigError, match=r"--overlap-steps .*: give auto, or a number from 0 to --sync-every"):
            Config(overlap_steps=text)


FIRST = """
    import gc, time
    from dadt.algorithms.local.outer import Fragment
    from harness import rounds as t
    model = t.mlp()
    optimizer = t.optimizer(model)
    for step in range(14):
        time.sleep(0.02)
        t.backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    report([each.overlap for each in gc.get_objects() if type(each) is Fragment])
"""


def test_the_first_mean_is_as_late_as_averages_of_the_synchronous_steps_were(dadt_run) -> None:
    """They are much faster than a step here, and half a round has four."""
    options = ["--algorithm", "local", "--warmup-steps", "12", "--sync-every", "8"]
    first, second = dadt_run(FIRST, *options).ranks
    assert first == second
    assert first[0] <= 1


EARLY = """
    from harness import rounds as t
    model = t.mlp()
    optimizer = t.optimizer(model)
    for step in range(20 if rank == 0 else 12):
        t.backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize("executor", [pytest.param("shm", marks=pytest.mark.slow), "gloo"])
def test_a_rank_that_ends_rounds_before_the_others(dadt_run, executor) -> None:
    run = dadt_run(EARLY, *LOCAL_SGD.options(), "--executor", executor, code=None)
    assert run.code == 1
    assert "local, the end" in run.output or "has ended" in run.output


DIGITS = """
    from scripts import digits
    report(digits.train(0, 0.1, 300))
"""


@pytest.mark.parametrize(
    "compression", ["none", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "powersgd:4"))]
)
def test_the_digits_are_learned(dadt_run, compression) -> None:
    """With the defaults. `sync` comes to 0.97 here."""
    run = dadt_run(DIGITS, "--algorithm", "local", "--batch", "global", "--compression", compression)
    assert min(run.ranks) > 0.96
    assert ("before compression" in run.output) == (compression != "none")
