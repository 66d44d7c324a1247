"""A job of several hosts, one of which was lost, goes on by the command that it has named."""

from __future__ import annotations

import re

import pytest
from harness.patience import await_that
from harness.replayed import HEAD

from dadt.control import snapshots

TRAIN = (
    HEAD
    + """
loader, model = DataLoader(data, batch_size=8, shuffle=True), net(8, 32, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(30):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(float(os.environ["PACE"]))
tell(model)
"""
)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_that_has_lost_a_host_goes_on(hosts, start, tmp_path) -> None:
    network = hosts(2)
    options = ("-np", "2", "-H", network.list(1), "--warmup-steps", "5", "--seed", "7", "--orphan-timeout", "5")
    options = (*options, "--snapshot-every", "10steps", "-x", "PACE", "-x", "MY_TOKEN", "train.py")
    undisturbed = start(network, TRAIN, *options, PACE="0", MY_TOKEN="hidden").finish()
    assert undisturbed.code == 0, undisturbed.err
    run = start(network, TRAIN, *options, PACE="0.05", MY_TOKEN="hidden")
    logs = tmp_path / "dadt-logs"
    await_that(lambda: [each for each in logs.glob("*/snapshots/*") if each.parts[-3] != undisturbed.job], "a snapshot")
    job = next(each.name for each in logs.iterdir() if each.name != undisturbed.job)
    await_that(lambda: snapshots.newest(logs / job / "snapshots"), "a whole snapshot")
    network.cut(network[1])
    lost = run.finish()
    assert lost.code == 3, lost.err
    assert re.search(rf"^dadt: h1: no sign of life for 5 s.*; go on with: dadt run --resume {job}$", lost.err, re.M)
    assert not any("hidden" in path.read_text() for path in logs.rglob("*.json"))
    network.heal(network[1])
    resumed = start(network, TRAIN, "--resume", job, "-x", "PACE=0", MY_TOKEN="hidden").finish()
    assert resumed.code == 0 and "2 workers on 2 hosts" in resumed.err, resumed.err
    ends = [re.findall(rb"ends with (\w+)", each.out) for each in (undisturbed, resumed)]
    assert len(ends[0]) == 2 and ends[0] == ends[1]
