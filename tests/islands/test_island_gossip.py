"""With `gossip` the new workers of an island begin in the midst of the job, together, with what their equals have."""

from __future__ import annotations

import json
import re

import pytest
from harness.journal import EVENTS
from harness.patience import PATIENCE
from harness.sharded import SHARDED

# All ranks train until as many as were lost have begun anew, and then for 30 steps more.
SCRIPT = f"""{SHARDED}{EVENTS}
import pathlib, time
logs = pathlib.Path("dadt-logs", os.environ["DADT_JOB"])
victim, again = map(int, sys.argv[1:])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

starts = [event["rank"] for event in events("started")].count(number)
if number == again and starts == 2:
    os.kill(os.getpid(), signal.SIGKILL)
n, last = 0, None
while last is None or n < last:
    drawn = torch.Generator().manual_seed(100 * n + number)
    optimizer.zero_grad()
    model(torch.randn(4, 8, generator=drawn)).pow(2).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    n += 1
    if n == 1:
        steps = {{int(state["step"]) for state in optimizer.state.values()}}
        print("begins with", json.dumps([number, starts, *steps]), flush=True)
    have_begun = sum(log.read_text().count("begins with") for log in logs.glob("rank*.log"))
    over = torch.tensor(float(have_begun >= 6))
    dist.all_reduce(over)  # all ranks of an island end together
    if last is None and over == 2:
        last = n + 30
    time.sleep(0.01)
    if n == 20 and number == victim and starts == 1:
        os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "again"), [(3, -1), (0, 1)])
@pytest.mark.timeout(400)
def test_a_new_island_takes_the_place_of_a_lost_one(start, victim: int, again: int) -> None:
    options = ["-np", "4", "--island", "2", "--min-np", "1", "--algorithm", "gossip"]
    result = start(SCRIPT, *options, "train.py", str(victim), str(again)).finish(3 * PATIENCE)
    assert result.code == 0, result.err
    first = dict[int, int]()
    for number, starts, *steps in map(json.loads, re.findall(r"begins with (.*)", result.out.decode())):
        assert len(steps) == 1
        assert (steps[0] == 1) == (starts == 1), (number, starts, steps)
        first[number] = starts
    island = victim - victim % 2
    assert f"training goes on without the island of ranks {island} and {island + 1}" in result.err
    tries = result.err.count(f"new workers start in place of ranks {island} and {island + 1}")
    assert tries == first[island] - 1 == first[island + 1] - 1 == (2 if again >= 0 else 1), result.err
