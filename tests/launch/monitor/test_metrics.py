"""`--metrics`: figures of a real job, as Prometheus and TensorBoard read them; `progress.jsonl` beside them."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT
from harness.journal import whole_lines
from harness.patience import PATIENCE, await_that
from harness.run import DADT, Run
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dadt_cli
import dadt_cli.report.page
from dadt.control.step_times import StepTimes, bound
from dadt.launch.actions import Outbox
from dadt.launch.members.rendezvous import Rendezvous
from dadt.launch.monitor import series
from dadt.launch.monitor.metrics.metric import METRICS
from dadt.launch.monitor.watch import Watch
from dadt_cli.report.record import JobRecord

STEPS = 60
TRAIN = f"""\
import os, time, torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
x = torch.randn({STEPS * 16}, 32)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
model = torch.nn.Linear(32, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for step, (inputs, wanted) in enumerate(loader):
    while not os.path.exists({{{STEPS // 2}: "half", {STEPS - 1}: "go"}}.get(step, ".")):
        time.sleep(0.02)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), wanted).backward()
    optimizer.step()
    time.sleep(0.005)
"""
CONTROL = """\
import os, time
from dadt.control.agent_client import Control
from dadt.world import World
control = Control.connect(World.from_env())
rank = control.world.rank
control.claim()
control.exchange("together", b"", 60.0)
control.progress(7, samples=70, waited=0.1, clock=1.0, sent=500, plain=2000, late=1, fell_back=1)
control.progress(17, last=True, samples=170, waited=0.6, clock=3.0, sent=1000, plain=4000, late=0, fell_back=1)
{}
"""
WAIT = "while not os.path.exists('go'): time.sleep(0.01)"
FAIL = WAIT + "\nif rank == 1: control.failed('ValueError', 'bad'); raise SystemExit(1)\ntime.sleep(600)"


def page(url: str) -> dict[str, list[Any]]:
    """Samples by name, as Prometheus's own reader takes them."""
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        text = answer.read().decode()
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def of(samples: dict[str, list[Any]], name: str, rank: int) -> float | None:
    return next((s.value for s in samples.get(f"dadt_{name}", []) if s.labels["rank"] == str(rank)), None)


def address_of(run: Run) -> str:
    """Where the job says that it is read."""
    assert run.process.stderr is not None
    for line in run.process.stderr:
        if found := re.search(rb"at (http://\S+)", line):
            return found[1].decode()
    raise AssertionError("no address was told")


def events_of(folder: Path) -> EventAccumulator:
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return reader


class Words(HTMLParser):
    """What a page shows, and its elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_real_job_is_scraped_and_read_by_tensorboard_and_reported(start: Callable[..., Run]) -> None:
    places = ["--metrics", "prometheus:0", "--metrics", "tensorboard:tb"]
    run = start(TRAIN, "-np", "2", *places, "--warmup-steps", "20", "--timeline", "out.json", "train.py")
    url = address_of(run)
    assert url.startswith("http://127.0.0.1:")
    await_that(lambda: len(_moments(run)) == 2, "samples of both ranks in progress.jsonl")
    (run.folder / "half").touch()

    def arrived() -> bool:
        samples = page(url)
        return all((of(samples, "steps_total", rank) or 0) >= STEPS - 1 for rank in (0, 1))

    await_that(arrived, "all steps but the last")
    samples = page(url)
    info = samples["dadt_job_info"][0].labels
    assert (info["job"], info["algorithm"], info["executor"], info["workers"]) == (run.job, "pipe", "shm", "2")
    for rank in (0, 1):
        assert of(samples, "staleness_steps", rank) == 1
        assert of(samples, "failures_total", rank) == of(samples, "fall_backs_total", rank) == 0
        assert 0 <= of(samples, "waiting_ratio", rank) <= 1
        assert of(samples, "memory_bytes", rank) > 50 << 20
        assert of(samples, "samples_total", rank) >= 8 * 20
        # 33 values and the lane of each step, at least.
        assert of(samples, "sent_bytes_total", rank) >= 20 * 33 * 4
    _report_of_a_running_job(run)
    (run.folder / "go").touch()
    result = run.finish()
    assert result.code == 0, result.err
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=PATIENCE)

    for rank in (0, 1):
        reader = events_of(run.folder / "tb" / run.job / f"rank{rank}")
        tags = reader.Tags()["scalars"]
        assert set(tags) <= {f"dadt/{metric.name}" for metric in METRICS}
        last = reader.Scalars("dadt/steps_total")[-1]
        assert (last.step, last.value) == (STEPS, STEPS)
        assert reader.Scalars("dadt/samples_total")[-1].value == STEPS * 8
        assert reader.Scalars("dadt/staleness_steps")[-1].value == 1
    folder = result.logs / run.job
    moments = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    assert {moment["rank"] for moment in moments} == {0, 1}
    assert moments[-1]["step"] == STEPS and moments[-1]["samples"] == STEPS * 8

    told = json.loads((folder / "report.json").read_text())
    for rank in told["ranks"]:
        times = rank["step_times"]
        assert sum(times["counts"].values()) == STEPS - 1
        least = sum(bound(int(size)) * count for size, count in times["counts"].items())
        assert least <= times["seconds"] <= least * bound(1) * 1.0001
        assert times["seconds"] >= (STEPS - 1) * 0.005
    done = subprocess.run([*DADT, "report"], cwd=run.folder, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    words = Words((run.folder / done.stdout.strip()).read_text())
    for word in ("done", "algorithm", "rank: samples per second", "Waiting", "median", "exposed wait", "Hosts"):
        assert word in words.text, word
    assert words.tags.count("figure") == 3 and "script" not in words.tags
    assert "Not all of it is there" not in words.text


def _report_of_a_running_job(run: Run) -> None:
    folder = run.folder / "dadt-logs" / run.job

    def told() -> bool:
        ranks = json.loads((folder / "report.json").read_text())["ranks"]
        return all(rank["steps"] >= STEPS - 1 for rank in ranks)

    await_that(told, "a report with all steps but the last")

    await_that(lambda: min(map(len, _moments(run).values())) > 1, "two moments of each rank, of which a curve is made")
    words = Words(dadt_cli.report.page.page(JobRecord.read(folder, True), True))
    for word in ("still runs", "rank: samples per second", "Step times: steps of all ranks", "Hosts", "--warmup-steps"):
        assert word in words.text, word
    assert words.tags.count("figure") == 3 and "Not all of it is there" not in words.text


def _moments(run: Run) -> dict[int, set[float]]:
    """When each rank had come further, by its own clock, as progress.jsonl tells it twice a second."""
    path = run.folder / "dadt-logs" / run.job / "progress.jsonl"
    found: dict[int, set[float]] = {}
    for moment in whole_lines(path):
        if moment["samples"]:
            found.setdefault(moment["rank"], set()).add(moment["clock"])
    return found


def test_sums_and_the_failure_are_told(start: Callable[..., Run]) -> None:
    run = start(
        CONTROL.format(FAIL), "-np", "2", "--metrics", "prometheus:0", "--metrics", "tensorboard:tb", "train.py"
    )
    url = address_of(run)
    await_that(lambda: all(of(page(url), "steps_total", rank) == 17 for rank in (0, 1)), "the steps")
    samples = page(url)
    assert of(samples, "waiting_seconds_total", 1) == 0.6
    assert of(samples, "sent_bytes_total", 0) == 1000 and of(samples, "compression_ratio", 0) == 4.0
    assert of(samples, "staleness_steps", 0) == 0 and of(samples, "fall_backs_total", 0) == 1
    runs = [run.folder / "tb" / run.job / f"rank{rank}" for rank in (0, 1)]

    def written() -> bool:
        return all(each.exists() and "dadt/steps_per_second" in events_of(each).Tags()["scalars"] for each in runs)

    await_that(written, "what TensorBoard is given once a second")
    (run.folder / "go").touch()
    result = run.finish()
    assert result.code == 1
    for rank in (0, 1):
        reader = events_of(runs[rank])
        assert reader.Scalars("dadt/failures_total")[-1].value == rank
        assert reader.Scalars("dadt/compression_ratio")[-1].value == 4.0
        speeds = {"steps_per_second": 5.0, "samples_per_second": 50.0, "waiting_ratio": 0.25}
        for name, value in speeds.items():
            assert value in [each.value for each in reader.Scalars(f"dadt/{name}")], name


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """refusal(place): what `dadt run --metrics place` says, where it starts nothing and ends with 2."""
    (tmp_path / "train.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)

    def run(place: str) -> str:
        monkeypatch.setattr(sys, "argv", ["dadt", "run", "-np", "1", "--metrics", place, "train.py"])
        assert dadt_cli._run() == 2
        said = capfd.readouterr().err
        assert said.startswith(f"dadt: --metrics {place}: ") and said.count("\n") == 1
        assert not (tmp_path / "dadt-logs").exists()
        return said

    return run


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("graphite:1", "give tensorboard:DIR, or prometheus:PORT"),
        ("prometheus:", "give tensorboard:DIR, or prometheus:PORT"),
        ("prometheus:http", "give a port, as prometheus:9100, or HOST:PORT"),
        ("prometheus:99999", "give a port, as prometheus:9100, or HOST:PORT"),
        ("prometheus:no.such.host.invalid:9100", "cannot listen there"),
        ("tensorboard:train.py/x", "cannot be made (Not a directory)"),
    ],
)
def test_what_cannot_be_is_one_sentence_before_the_job(
    refusal: Callable[[str], str], place: str, sentence: str
) -> None:
    assert sentence in refusal(place)


def test_a_port_has_one_job(refusal: Callable[[str], str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        said = refusal(f"prometheus:{other.getsockname()[1]}")
    assert "another program listens there, perhaps another job; give each a port of its own" in said


@pytest.mark.parametrize(("kind", "package"), [("prometheus", "prometheus_client"), ("tensorboard", "tensorboard")])
def test_a_library_that_is_missing_is_named_with_its_extra(
    refusal: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, kind: str, package: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package or name.endswith(f"metrics.{kind}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    words = rf"needs {package}\S*, which is not installed -> pip install 'dadt\[{kind}\]'"
    assert re.search(words, refusal(f"{kind}:0"))


def test_progress_is_thinned_and_stays_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "SECONDS", 0.0)
    monkeypatch.setattr(series, "LEAST", 8)
    monkeypatch.setattr(series, "MOMENTS", 8)
    warned: list[str] = []
    outbox = Outbox()
    watch = Watch(Rendezvous(["", "", "", ""], outbox, 0.0).members, outbox, 0.0, 0.0)
    recorded = series.Series(tmp_path / "progress.jsonl", watch, warned.append)
    recorded.tick()
    assert not (tmp_path / "progress.jsonl").exists()
    for step in range(1, 101):
        for gauge in watch.gauges[:3]:
            gauge.mark(step, {"samples": 10 * step, "waited": 0.0, "clock": float(step), "sent": step}, float(step))
        recorded._due = 0.0
        recorded.tick()
    recorded.close()
    recorded.close()
    moments = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    steps = [moment["step"] for moment in moments if moment["rank"] == 2]
    assert 4 <= len(steps) <= 9 and steps == sorted(steps) and steps[-1] == 100
    assert all(moment["samples"] == 10 * moment["step"] for moment in moments)
    assert len(moments) == 3 * len(steps)
    assert not warned and sorted(p.name for p in tmp_path.iterdir()) == ["progress.jsonl"]


def test_progress_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    warned: list[str] = []
    outbox = Outbox()
    watch = Watch(Rendezvous([""], outbox, 0.0).members, outbox, 0.0, 0.0)
    watch.gauges[0].mark(1, {"clock": 1.0}, 1.0)
    recorded = series.Series(tmp_path / "none" / "progress.jsonl", watch, warned.append)
    for _ in range(3):
        recorded._due = 0.0
        recorded.tick()
    recorded.close()
    assert len(warned) == 1 and "is incomplete: No such file or directory" in warned[0]


def test_step_times_are_counted_by_size() -> None:
    times = StepTimes()
    for now in (5.0, 6.0, 7.0, 7.25, 7.25):
        times.stepped(now)
    assert times.describe() == {"counts": {0: 2, -16: 1}, "seconds": 2.25}
    assert (bound(0), bound(-16), bound(8)) == (1.0, 0.25, 2.0)


def test_each_metric_is_on_the_page() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert not [metric.name for metric in METRICS if f"| `{metric.name}` |" not in text]
