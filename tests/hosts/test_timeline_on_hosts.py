"""A timeline of ranks on several hosts: one file where rank 0 is, and one time; and their figures at the launcher."""

from __future__ import annotations

import json

from harness.trace import check_format
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TRAIN = """
import torch
model = torch.nn.Linear(100, 10); optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(10):
    optimizer.zero_grad(); model(torch.randn(8, 100)).pow(2).mean().backward(); optimizer.step()
"""


def test_ranks_on_several_hosts_are_in_one_time(hosts, start):
    network = hosts(2)
    told = ["--timeline", "t.json", "--metrics", "tensorboard:m"]
    run = start(network, TRAIN, "-np", 2, "-H", network.list(1), *told, "train.py")
    result = run.finish()
    assert result.code == 0, result.err
    assert [path.name for path in run.folder.glob("t.json*")] == ["t.json"]
    events = json.loads((run.folder / "t.json").read_text())["traceEvents"]
    check_format(events)
    error = max(event["args"].get("clock_error_us", 0) for event in events if event["name"] == "dadt")
    assert error > 0  # different hosts: a bound is known
    begins, ends = (
        {e["name"]: e["ts"] + end * e["dur"] for e in events if e.get("cat") == "allreduce" and e["pid"] == rank}
        for rank, end in ((0, 0), (1, 1))
    )
    assert begins.keys() == ends.keys() and len(begins) >= 10
    (job,) = (run.folder / "m").iterdir()
    for rank in range(2):
        figures = EventAccumulator(str(job / f"rank{rank}"))
        figures.Reload()
        assert figures.Scalars("dadt/steps_total")[-1].value == 10
    # Nobody has an average before rank 0 has begun to give its part.
    assert all(ends[name] >= begins[name] - error for name in begins)
