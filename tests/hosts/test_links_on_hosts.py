"""Links between hosts, as they are told of: where a cable is bad, and where all is well."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import time

import pytest
from harness import forkserver
from harness.patience import PATIENCE, await_that

TRAIN = """
import os, torch
torch.set_num_threads(1)
inputs = torch.randn(1, 500)
model = torch.nn.Linear(500, 1000, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range({steps}):
    optimizer.zero_grad()
    model(inputs * (1 + int(os.environ["RANK"]))).pow(2).mean().backward()
    optimizer.step()
"""
LEAST = 10
"""Mbit/s that a link of 100 Mbit/s on which packets are lost carries at least, where its host does other work, too."""
TOLD = re.compile(r"h0 to h1: (\d+) Mbit/s, (\d\.\d) % sent again \(other links: [^)]*\); ranks wait \d+ %")
ROW = re.compile(r"h0 +h1 +[\d.]+ MiB +(\d+) Mbit/s +(\d\.\d) % +\d+\.\d\d ms +")


@pytest.mark.parametrize("executor", ["tcp", pytest.param("hierarchical:tcp", marks=pytest.mark.slow)])
def test_a_bad_cable_is_told_by_the_names_of_its_hosts(hosts, start, executor):
    network = hosts(2)
    network.damage(network[1], "100mbit", 0.01)
    # Where packets travel in packs of 64 KB, whole packs would be lost.
    network[0].run("ip", "link", "set", "eth0", "gso_max_segs", "1")
    options = ["--algorithm", "sync", "--metrics", "prometheus:9100", "--timeline", "out.json", "--executor", executor]
    job = start(network, TRAIN.format(steps=120), "-np", 2, "-H", network.list(1), *options, "train.py")
    seen = [""]

    def shows() -> bool:
        assert job.process.poll() is None, job.finish()
        if names := sorted((job.folder / "dadt-logs").glob("????")):  # the job answers a moment later
            ps = network.launcher.enter([forkserver.dadt(), "ps", "-v", names[0].name])
            seen.append(subprocess.run(ps, capture_output=True, text=True, timeout=PATIENCE).stdout)
        return ROW.search(seen[-1]) is not None

    await_that(shows, "the link in `dadt ps -v`")
    found = ROW.search(seen[-1])
    assert LEAST <= int(found[1]) <= 100, seen[-1]
    fetch = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9100/metrics').read().decode())"

    def scraped() -> bool:
        page = network.launcher.run("python3", "-c", fetch)
        names = ("sent_bytes_total", "resent_bytes_total", "bits_per_second", "round_trip_seconds", "queue_bytes")
        return all(re.search(rf'dadt_link_{name}{{.*source="h0",target="h1"}} \d', page) for name in names)

    await_that(scraped, "the link in the metrics")

    result = job.finish(PATIENCE)
    assert result.code == 0, result.err
    (told,) = TOLD.findall(result.err)
    assert LEAST <= int(told[0]) <= 100 and 0.5 <= float(told[1]) <= 3.0
    assert result.err.count("sent again") == 1
    folder = job.folder / "dadt-logs" / job.job
    there, back = json.loads((folder / "report.json").read_text())["links"]
    assert (there["source"], there["target"]) == ("h0", "h1")
    assert 120 * 2e6 < there["sent"] < 1.1 * 120 * 2e6
    assert there["received"] == pytest.approx(there["sent"], rel=0.01)
    assert 1e6 * LEAST <= there["rate"] <= 100e6 and back["rate"] > there["rate"]
    assert 0.005 <= there["resent_ratio"] <= 0.03 and back["resent_ratio"] < 0.005
    assert "link" in [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]
    events = [json.loads(line.rstrip(",")) for line in (job.folder / "out.json").read_text().splitlines()[1:-1]]
    rates = [event["args"]["Mbit/s sent"] for event in events if event["ph"] == "C" and event["pid"] == 0]
    assert LEAST <= statistics.median(rates) <= 110  # where one was lost, acknowledgments of many packets come at once
    network.launcher.run(forkserver.dadt(), "report", folder)
    report = (folder / "report.html").read_text()
    assert "Links between hosts" in report and "sent again (other links" in report
    assert "time per step" in network.launcher.run(forkserver.dadt(), "timeline", job.folder / "out.json")


@pytest.mark.slow
def test_nothing_is_told_of_a_sound_network(hosts, start):
    network = hosts(3)
    for host in network.hosts:
        host.slow("200mbit", "50ms")
    job = start(network, TRAIN.format(steps=150), "-np", 3, "-H", network.list(1), "train.py")
    begin = time.monotonic()
    result = job.finish(PATIENCE)
    assert result.code == 0, result.err
    assert "sent again" not in result.err
    report = json.loads((job.folder / "dadt-logs" / job.job / "report.json").read_text())
    assert len(report["links"]) == 6
    seconds = time.monotonic() - begin
    for link in report["links"]:
        assert link["sent"] * 8 / seconds < link["rate"] < 210e6
