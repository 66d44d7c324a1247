"""Ranks whose weights have come apart end with an error; what a script does behind its last step is its own."""

from __future__ import annotations

import pytest

TRAIN = """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    noise = torch.Generator().manual_seed(rank)
    for step in range(30):
        x = torch.randn(8, 6, generator=noise)
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        if {amid}:
            {change}
    with torch.no_grad():
        {afterwards}
    print("ended", step)
    file = open(f"left-open-{{rank}}", "w")
    file.write("all of it")
"""
IN_PLACE = "with torch.no_grad(): [p.add_(torch.randn(p.shape, generator=noise), alpha=1e-3) for p in {which}]"
BY_DATA = "[p.data.add_(torch.randn(p.shape, generator=noise), alpha=1e-3) for p in {which}]"
SAID = "the ranks' weights differ at the end: those that SGD trains, first in {name}, on rank 1 from those on rank 0"


def script(amid: str = "False", change: str = "pass", afterwards: str = "pass") -> str:
    return TRAIN.format(amid=amid, change=change, afterwards=afterwards)


ALL, ONE = "model.parameters()", "[model[2].bias]"


@pytest.mark.parametrize(
    ("amid", "change", "algorithm"),
    [
        ("True", IN_PLACE.format(which=ALL), "pipe"),
        ("step == 25 and rank == 1", BY_DATA.format(which=ONE), "sync"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("True", BY_DATA.format(which=ALL), "sync"),
                ("True", IN_PLACE.format(which=ONE), "sync"),
                ("step == 3", "model[2].reset_parameters()", "pipe"),
                ("step == 28 and rank == 1", "model[2].bias.data = model[2].bias.data + 1", "pipe"),
            )
        ),
    ],
)
def test_weights_that_have_come_apart_end_the_job(dadt_run, amid: str, change: str, algorithm: str) -> None:
    run = dadt_run(script(amid, change), "--algorithm", algorithm, "--warmup-steps", "8", code=1)
    assert run.output.count("ended 29") == 2
    name = "2.bias" if ONE in change or "bias" in change else "2.weight" if "reset" in change else "0.weight"
    assert SAID.format(name=name) in run.output
    assert "--verify-every" in run.output
    assert "Traceback" not in run.output


OTHER = "model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})"
AFTERWARDS = [
    f"rank == 0 and {OTHER}",
    "rank == 0 and [p.data.mul_(0.9) for p in model.parameters()]",  # an average of weights, say
    "[p.add_(torch.randn(p.shape, generator=noise)) for p in model.parameters()]",
    "rank == 1 and model.half()",
    "rank == 1 and model[2].reset_parameters()",
]


@pytest.mark.parametrize("algorithm", ["sync", pytest.param("pipe", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "afterwards", [AFTERWARDS[0], *(pytest.param(a, marks=pytest.mark.slow) for a in AFTERWARDS[1:])]
)
def test_what_comes_behind_the_last_step_is_the_scripts(dadt_run, algorithm: str, afterwards: str) -> None:
    run = dadt_run(script(afterwards=afterwards), "--algorithm", algorithm, "--warmup-steps", "8")
    assert "differ" not in run.output


@pytest.mark.slow
def test_a_file_that_is_left_open_is_written(dadt_run, tmp_path) -> None:
    dadt_run(script("True", IN_PLACE.format(which=ALL)), alone=True, code=1)
    assert (tmp_path / "left-open-0").read_text() == "all of it"
