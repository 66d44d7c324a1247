"""A rank that is lost takes its island with it, and the other islands train on (`--min-np`)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from harness.sharded import SHARDED

SCRIPT = f"""{SHARDED}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
lost = dict(zip(sys.argv[1::2], map(int, sys.argv[2::2])))
for step in range(40):
    generator = torch.Generator().manual_seed(100 * step + number)
    optimizer.zero_grad()
    model(torch.randn(4, 8, generator=generator)).pow(2).mean().backward()
    if lost.get(str(number)) == step:
        if step % 2:
            raise ValueError("lost")
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    if dist.get_rank() == 0:
        with open("log.txt", "a") as log:
            print(step, file=log)
weights = torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()])
print("weights", json.dumps(weights.tolist()), flush=True)
if dist.get_rank() == 0:
    torch.save(weights, "weights.pt")
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("islands", "lost", "algorithm"),
    [
        (2, {0: 20}, "pipe"),
        pytest.param(2, {3: 21}, "sync", marks=pytest.mark.slow),
        pytest.param(2, {1: 0}, "pipe", marks=pytest.mark.slow),
        pytest.param(3, {1: 20}, "pipe", marks=pytest.mark.slow),
        pytest.param(3, {3: 11, 5: 30}, "sync", marks=pytest.mark.slow),
        pytest.param(3, {0: 21, 3: 22}, "pipe", marks=pytest.mark.slow),
        pytest.param(3, {4: 20}, "local", marks=pytest.mark.slow),
        pytest.param(3, {2: 20}, "gossip", marks=pytest.mark.slow),
    ],
)
def test_the_other_islands_train_on(launch, tmp_path: Path, islands: int, lost: dict[int, int], algorithm: str) -> None:
    options = [
        "-np",
        str(2 * islands),
        "--island",
        "2",
        "--min-np",
        "1",
        "--algorithm",
        algorithm,
        "--warmup-steps",
        "5",
    ]
    words = [str(each) for pair in lost.items() for each in pair]
    result = launch(SCRIPT, *options, "train.py", *words)
    assert result.code == 0, result.err
    left = 2 * (islands - len({rank // 2 for rank in lost}))
    found = [json.loads(each) for each in re.findall(r"weights (.*)", result.out.decode())]
    assert len(found) == left and (algorithm in ("local", "gossip") or all(each == found[0] for each in found))
    for rank in lost:
        first = rank - rank % 2
        assert re.search(
            rf"rank {rank} .*: training goes on without the island of ranks {first} and {first + 1}", result.err
        )
    # the first island that is left writes, from the step at which it is the first
    assert (tmp_path / "weights.pt").exists()
    written = list(map(int, (tmp_path / "log.txt").read_text().split()))
    assert written[-1] == 39 and len(set(written)) >= 39


def test_as_many_islands_as_asked_for_have_to_be_left(launch) -> None:
    result = launch(SCRIPT, "-np", "4", "--island", "2", "--min-np", "2", "train.py", "3", "20")
    assert result.code == 137, result.err
    assert "worker 3 failed (killed by signal 9, SIGKILL)" in result.err
    assert "signal 9 (SIGKILL), not sent by dadt" in result.err
