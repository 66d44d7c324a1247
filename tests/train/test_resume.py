"""A training that goes on from a checkpoint is the training that was not interrupted, bit for bit."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import SCRIPTS, forkserver
from harness.patience import PATIENCE

from dadt.inject.data import seed

SCRIPT = SCRIPTS / "resume.py"
STEPS = 6
"""Of one pass, on two ranks."""
WARMUP = ("--warmup-steps", str(2 * STEPS - 1))
"""So pass 1 ends within the warm-up, pass 2 with the step that applies nothing, and pass 3 long after."""

Train = Callable[..., tuple[Path, str]]


def trainer(base: Path) -> Train:
    """train(name, *arguments, options=) runs the script into a folder of this name: under `dadt run` with these
    options, or, for None, without DADT."""

    def train(name: str, *arguments: str, options: tuple[str, ...] | None = WARMUP, np: int = 2) -> tuple[Path, str]:
        folder = base / name
        folder.mkdir()
        launch = [forkserver.python()] if options is None else [forkserver.dadt(), "run", "-np", str(np), *options]
        command = [*launch, str(SCRIPT), "--folder", str(folder), *arguments]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=base, capture_output=True, timeout=PATIENCE, env=env)
        output = (done.stdout + done.stderr).decode(errors="replace")
        assert done.returncode == 0, output
        return folder, output

    return train


@pytest.fixture
def train(tmp_path: Path) -> Train:
    return trainer(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four passes of `pipe` that nothing interrupts."""
    return trainer(tmp_path_factory.mktemp("whole"))("whole")[0]


def load(folder: Path, number: int) -> dict[str, Any]:
    return torch.load(folder / f"pass{number}.pt", weights_only=True)


def resume(folder: Path, number: int) -> tuple[str, str]:
    return "--resume", str(folder / f"pass{number}.pt")


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two checkpoints are not the same, bit for bit."""
    if isinstance(a, torch.Tensor):
        return [] if torch.equal(a, b) else [where]
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        return [d for key in a for d in differences(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        return [d for i, (x, y) in enumerate(zip(a, b)) for d in differences(x, y, f"{where}/{i}")]
    return [] if a == b else [where]


def assert_goes_on(whole: Path, resumed: Path, last: int = 4) -> None:
    """Weights, buffers, optimizer states, what DADT keeps beside them, and all losses of both ranks."""
    assert differences(load(whole, last), load(resumed, last)) == []
    assert_same_losses(whole, resumed)


def assert_same_losses(whole: Path, resumed: Path) -> None:
    for rank in range(2):
        expected, found = (torch.load(f / f"losses{rank}.pt", weights_only=True) for f in (whole, resumed))
        assert 0 < len(found) < len(expected)
        assert torch.equal(expected[-len(found) :], found), f"losses of rank {rank}"


@pytest.mark.parametrize(
    "passes", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_pipe_goes_on_bit_for_bit(train: Train, whole: Path, passes: int) -> None:
    """From within the warm-up, from the step that applies nothing, and from long after."""
    in_flight = [len(o["dadt"]["state"]["in_flight"]) for o in load(whole, passes)["optimizers"]]
    assert in_flight == [int(passes > 1)] * 2
    resumed, _ = train("resumed", *resume(whole, passes))
    assert_goes_on(whole, resumed)


@pytest.mark.slow
def test_sync_goes_on_bit_for_bit_and_keeps_nothing_of_the_models_size(train: Train) -> None:
    options = ("--algorithm", "sync")
    whole, _ = train("whole", "--passes", "2", options=options)
    resumed, _ = train("resumed", "--passes", "2", *resume(whole, 1), options=options)
    assert_goes_on(whole, resumed, 2)
    for state in load(whole, 1)["optimizers"]:
        assert state["dadt"]["state"] == {}
        assert state["dadt"]["prediction"] == {"clip": 1.0, "average": {}}


@pytest.mark.slow
def test_rank_0_may_save_and_load_alone(train: Train, whole: Path) -> None:
    """Near the whole: what ranks expect of the gradient in flight is in no checkpoint, so one step is predicted
    otherwise."""
    saved, _ = train("saved", "--alone")
    resumed, _ = train("resumed", "--alone", *resume(saved, 3))
    before, expected, found = load(saved, 3), load(saved, 4), load(resumed, 4)
    for model in range(len(expected["models"])):
        a, b, c = (weights(state["models"][model]) for state in (before, expected, found))
        assert 0 < (c - b).norm() < 0.25 * (b - a).norm()


def weights(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten() for name, value in state.items() if not name.startswith("1.")])


def test_without_what_is_kept_beside_training_begins_anew(train: Train, whole: Path, tmp_path: Path) -> None:
    state = load(whole, 3)
    for optimizer in state["optimizers"]:
        del optimizer["dadt"]
    torch.save(state, tmp_path / "pass3.pt")
    resumed, output = train("bare", *resume(tmp_path, 3), options=("--warmup-steps", "3"))
    assert "warm-up done after 3 steps" in output
    assert differences(load(whole, 4)["models"], load(resumed, 4)["models"])


def test_loads_without_dadt(train: Train, whole: Path) -> None:
    resumed, _ = train("plain", *resume(whole, 3), options=None)
    assert [set(o) for o in load(resumed, 4)["optimizers"]] == [{"state", "param_groups"}] * 2


@pytest.mark.slow
def test_other_ranks_and_other_algorithms_take_what_fits(train: Train, whole: Path) -> None:
    """The averages in flight are means, however many ranks made them; another algorithm has no use for them."""
    more, output = train("more", *resume(whole, 3), np=3)
    assert "the checkpoint is one of 2 ranks: 3 go on from it at step 18" in output
    assert "warm-up done" not in output
    assert load(more, 4)["optimizers"][0]["dadt"]["step"] == 18 + 4
    other, output = train("other", *resume(whole, 3), options=("--algorithm", "sync"))
    assert "the checkpoint is one of --algorithm pipe: --algorithm sync goes on" in output
    assert load(other, 4)["optimizers"][0]["dadt"]["step"] == STEPS


STALLED = """
    import time, dadt
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(10):
        while rank == 1 and step == 8 and not os.path.exists({there!r}):
            time.sleep(0.05)
        optimizer.zero_grad()
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        if step == 8:
            try:
                said = optimizer.state_dict()
            except dadt.CommError as error:
                said = str(error)
            report([said, optimizer.state_dict()["dadt"]["state"]])
            break
"""


@pytest.mark.slow
def test_a_checkpoint_does_not_wait_for_ever_for_what_is_in_flight(dadt_run, tmp_path: Path) -> None:
    """Rank 1 does not come to the step whose gradient is under way on rank 0."""
    script = STALLED.format(there=str(tmp_path / "rank0.pt"))
    run = dadt_run(script, "--warmup-steps", "4", "--timeout", "8", code=None)
    said, after = run.ranks[0]
    assert "rank 1" in said
    assert after == {}, "what comes after the failure is a checkpoint without the gradient"
    assert "saved after a failure: without the gradients in flight" in run.output


LOW_RANK = """
    import io

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 16), nn.Linear(16, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train(model, optimizer, steps):
        losses = []
        for step in steps:
            x = torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [torch.stack(losses), *(p.detach().clone() for p in model.parameters())]

    def save(model, optimizer):
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        return file.getvalue()

    def load(saved, model, optimizer):
        for part, state in zip((model, optimizer), torch.load(io.BytesIO(saved), weights_only=True)):
            part.load_state_dict(state)

    model, optimizer = make()
    train(model, optimizer, range(12))
    saved = save(model, optimizer)
    found = {"whole": train(model, optimizer, range(12, 20))}
    load(saved, model, optimizer)
    found["back"] = train(model, optimizer, range(12, 20))
    again = make()
    load(saved, *again)
    found["resumed"] = train(*again, range(12, 20))
    found["in_flight"] = len(optimizer.state_dict()["dadt"]["state"].get("in_flight", []))
    if rank == 0:  # alone: the others do not wait
        again[1].state_dict()
    found["alone"] = train(*again, range(20, 24))
    report(found)
"""


@pytest.mark.parametrize("algorithm", ["pipe", pytest.param("sync", marks=pytest.mark.slow)])
def test_powersgd_goes_on_bit_for_bit(dadt_run, algorithm: str) -> None:
    """In new objects, as in a new process; in the old ones, back from what they have learned since; and saved by rank
    0 alone."""
    options = ("--algorithm", algorithm, "--compression", "powersgd:2", "--warmup-steps", "5", "--bucket-mb", "0.003")
    run = dadt_run(LOW_RANK, *options)
    for found in run.ranks:
        assert differences(found["whole"], found["back"], "back") == []
        assert differences(found["whole"], found["resumed"], "resumed") == []
        assert found["in_flight"] == (algorithm == "pipe")
        assert all(value.isfinite().all() for value in found["alone"])
    assert differences(run.ranks[0]["alone"][1:], run.ranks[1]["alone"][1:], "saved by rank 0 alone") == []
    assert "x less than uncompressed" in run.output and "leaves out" not in run.output


def test_random_states_survive_a_file(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [float(torch.rand(())), np.random.standard_normal(), random.gauss(0, 1), random.random()]

    draw()  # numpy and random have the second number of a pair in store
    state = seed.State.capture()
    expected = draw()
    torch.save(state.plain(), tmp_path / "state.pt")
    seed.State.from_plain(torch.load(tmp_path / "state.pt", weights_only=True)).restore()
    assert draw() == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--predict", "1.8,-0.9"),
        ("--executor", "gloo"),
        ("--compression", "int8"),
        ("--compression", "powersgd:1", "--executor", "gloo"),
        ("--compression", "powersgd:1", "--algorithm", "sync"),
        ("--algorithm", "sync", "--no-buffers"),
    ],
)
def test_every_kind_of_exchange_goes_on(train: Train, options: tuple[str, ...]) -> None:
    options = (*options, "--warmup-steps", "3")
    whole, _ = train("whole", "--passes", "3", options=options)
    resumed, _ = train("resumed", "--passes", "3", *resume(whole, 2), options=options)
    assert_same_losses(whole, resumed)
    assert [d for d in differences(load(whole, 3), load(resumed, 3)) if "running" not in d] == []


@pytest.mark.slow
def test_a_script_that_seeds_each_pass_goes_on_with_its_dropout_too(train: Train) -> None:
    """And may go back in the middle: to the gradient in flight, displacement and buffers of then."""
    script = ("--seed-passes", "--dropout", "0.2")
    options = (*WARMUP, "--seed", "1")
    whole, _ = train("whole", *script, options=options)
    resumed, _ = train("resumed", *script, *resume(whole, 2))
    assert_goes_on(whole, resumed)
    back, _ = train("back", *script, "--back", "2", options=options)
    assert differences(load(whole, 4), load(back, 4)) == []
