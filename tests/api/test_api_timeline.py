"""dadt.init(timeline_path=...): named tensors are negotiated, queued and exchanged."""

from __future__ import annotations

import json

from harness.job import run_api as run
from harness.trace import check_format

SCRIPT = """
    dadt.init(timeline_path="t.json", cycle_duration_ms=50)
    for step in range(3):
        for handle in [dadt.all_reduce_async(torch.ones(10), name=f"tensor {i}") for i in range(5)]:
            handle.wait()
    chosen = dadt.add_process_set([1])
    if dadt.rank() == 1:
        dadt.all_reduce(torch.ones(3), name="alone", process_set=chosen)
    report(dadt.rank())
"""


def test_named_tensors_are_shown(tmp_path) -> None:
    done = run(tmp_path, SCRIPT)
    assert done.ranks == [0, 1]
    assert [path.name for path in tmp_path.glob("t.json*")] == ["t.json"]
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    check_format(events)
    for rank in (0, 1):
        begun = [(e["cat"], e["name"]) for e in events if e["pid"] == rank and e["ph"] == "b"]
        assert all(begun.count(("negotiate", f"tensor {i}")) == 3 for i in range(5))
        tracks = {e["args"]["name"] for e in events if e["pid"] == rank and e["name"] == "thread_name"}
        assert "named tensors of ProcessSet([0, 1])" in tracks
        assert ("named tensors of ProcessSet([1])" in tracks) == (rank == 1)
    assert [e["pid"] for e in events if e["name"] == "alone" and e["ph"] == "X"] == [1]
