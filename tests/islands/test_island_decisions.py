"""What ranks decide by what they measure or see, which ranks in all places of all islands must decide alike."""

from __future__ import annotations

import json
import math
import re

import pytest
from harness.run import Result
from harness.sharded import PARTS, SHARDED, parts

SCRIPT = f"""{SHARDED}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for n in range(int(sys.argv[1])):
    generator = torch.Generator().manual_seed(100 * n + number)
    optimizer.zero_grad()
    model(torch.randn(4, 8, generator=generator)).pow(2).mean().backward()
    if n == 10 and [str(number)] == sys.argv[2:]:
        model[2].weight.grad.to_local().fill_(torch.nan)
    optimizer.step()
weights = torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()])
print("weights", json.dumps(weights.tolist()), flush=True)
dist.destroy_process_group()
"""


def weights(result: Result) -> list[float]:
    assert result.code == 0, result.err
    found = [json.loads(each) for each in re.findall(r"weights (.*)", result.out.decode())]
    assert len(found) == 4 and all(each == found[0] for each in found)
    return found[0]


@pytest.mark.parametrize("algorithm", ["sync", pytest.param("pipe", marks=pytest.mark.slow)])
def test_a_part_that_is_not_finite_leaves_out_the_whole_step(launch, algorithm: str) -> None:
    """Only the second ranks of two islands average this part, and the first ones leave out the step as well."""
    options = [
        "-np",
        "4",
        "--island",
        "2",
        "--algorithm",
        algorithm,
        "--on-nan",
        "skip",
        "--warmup-steps",
        "5",
        "train.py",
    ]
    result = launch(SCRIPT, *options, "11" if algorithm == "sync" else "30", "3")
    told = "step 10: the gradient of 2.weight is not finite in island 1; all ranks leave the step out"
    assert result.err.count(told) == 1, result.err
    found = weights(result)
    assert all(map(math.isfinite, found))
    assert algorithm == "pipe" or found == weights(launch(SCRIPT, *options, "10"))


@pytest.mark.parametrize(
    "options",
    [
        ["--algorithm", "auto", "--compression", "auto"],
        pytest.param(["--compression", "auto"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_all_choose_the_same(launch, options: list[str]) -> None:
    result = launch(PARTS + SCRIPT, "-np", "4", "--island", "2", "--no-fall-back", *options, "train.py", "60")
    assert result.code == 0 and "auto chooses" in result.err, result.err
    found = parts(result.out)  # as `local` may be what is chosen, whose ranks differ before the end
    assert len(found) == 4 and all(part == found[number % 2] for number, part in found.items()), result.err


@pytest.mark.parametrize(
    ("hosts", "again"), [(2, True), pytest.param(1, False, marks=pytest.mark.slow)], ids=["two hosts", "one host"]
)
def test_a_script_that_shards_over_all_hosts_begins_again_in_islands(launch, hosts: int, again: bool) -> None:
    options = ["-np", "4", "--island", "auto", "--algorithm", "sync", *["--simulate-hosts", "2"] * (hosts > 1)]
    result = launch(SCRIPT, *options, "train.py", "10")
    told = "dadt: the script shards its model over all hosts: the job begins again with --island host\n"
    assert result.err.count(told) == again and ("2 islands of 2 ranks" in result.err) == again, result.err
    assert "Traceback" not in result.err + result.out.decode()
    if again:
        weights(result)
