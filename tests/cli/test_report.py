"""`dadt report`: what stands on the page, that nothing of a job gets out of its text, and what of a damaged folder."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from harness.patience import PATIENCE
from harness.run import DADT

import dadt_cli
from dadt_cli.report.page import page
from dadt_cli.report.record import REPORT, JobRecord

EVIL = "<script>alert('&amp;')</script>\"'>"
FAILING = """\
import os, sys, time
from dadt.control.agent_client import Control
from dadt.world import World
control = Control.connect(World.from_env())
rank = control.world.rank
control.hello(torch="2.13"); control.claim()
control.exchange("together", b"", 60.0)
for step in range(1, 5):
    times = {"counts": {"-40": step, "-39": 1}, "seconds": 0.04 * step}
    control.progress(step, True, samples=8 * step, waited=0.01 * step, clock=0.1 * step, sent=9, step_times=times)
    control.exchange(f"step {step}", b"", 60.0)
    time.sleep(0.55)
print("\\rstep 1 of 4" * 50 + "\\rstep 4 of 4", flush=True)
print("\\x1b[31mthe last words\\x1b[0m of <b>rank</b>", rank, flush=True)
control.say("<i>learning rate</i> is high", level="warning")
if rank == 1:
    raise ValueError(sys.argv[1])
time.sleep(600)
"""
Report = Callable[..., tuple[int, str, str]]
VOID = {"meta", "path", "rect", "link", "br"}


class Page(HTMLParser):
    """Its text by section, and whether every element is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: dict[str, str] = {"": ""}
        self.tags: list[str] = []
        self.outside: list[str] = []
        self._section = ""
        self.feed(text)
        self.close()
        assert not self.open, self.open

    @property
    def text(self) -> str:
        return "\n".join(self.sections.values())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        # What would be fetched, or run.
        self.outside += [f"{name}={value}" for name, value in attrs if name in ("src", "href") or name.startswith("on")]
        if tag == "section":
            self._section = given["id"] or ""
            self.sections[self._section] = ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open.pop() == tag
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.sections[self._section] += data


def read(folder: Path, running: bool = False) -> Page:
    found = Page(page(JobRecord.read(folder, running), running))
    assert "script" not in found.tags and not found.outside
    return found


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Report:
    """report(*arguments, cwd=): exit code, stdout and stderr of `dadt report`."""

    def run(*arguments: str, cwd: Path) -> tuple[int, str, str]:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["dadt", "report", *arguments])
        return dadt_cli._run(), *capfd.readouterr()

    return run


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that has failed; where it was run is above its logs."""
    folder = tmp_path_factory.mktemp("failed")
    (folder / "train.py").write_text(FAILING)
    command = [*DADT, "run", "-np", "2", "train.py", EVIL]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1, done.stderr
    (logs,) = (folder / "dadt-logs").iterdir()
    return logs


@pytest.fixture
def copy(failed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(failed, tmp_path / failed.name))


def test_a_failure_is_on_the_page_and_all_of_it_is_text(failed: Path, report: Report) -> None:
    assert report(cwd=failed.parents[1]) == (0, f"dadt-logs/{failed.name}/report.html\n", "")
    raw = (failed / "report.html").read_text()
    assert "<script" not in raw and "<b>rank" not in raw and "<i>" not in raw.replace('<i class="c', "")
    shown = Page(raw)
    assert "script" not in shown.tags and not shown.outside
    assert "failed, exit code 1" in shown.sections[""]
    assert f"train.py '{EVIL.replace(chr(39), chr(39) + chr(34) + chr(39) + chr(34) + chr(39))}'" in shown.sections[""]
    failure = shown.sections["failure"]
    assert "Rank 1 failed first" in failure and f"ValueError: {EVIL}" in failure
    assert "raise ValueError(sys.argv[1])" in failure and "at step 4" in failure
    assert "the last words of <b>rank</b> 1" in failure and "Traceback" in failure
    assert "step 4 of 4" in failure and "step 1 of 4" not in failure
    assert "because of it were stopped: rank 0" in failure
    assert "<i>learning rate</i> is high" in shown.sections["events"]
    assert "Throughput of each rank: samples per second" in shown.sections["progress"]
    # 8 samples in 0.1 s, 0.01 s of them waiting, as the ranks have told.
    assert "rank 0: 80" in shown.sections["progress"] and "rank 1: 10 %" in shown.sections["progress"]
    assert shown.tags.count("figure") == 3
    assert "missing" not in shown.sections and "No timeline was recorded" in shown.sections["timeline"]
    assert sys.version.split()[0] in shown.sections["environment"]


def test_the_step_times_are_those_that_were_told(failed: Path) -> None:
    shown = read(failed).sections["step-times"]
    # 2^(-40/8) s is 31.3 ms; four of five steps of each rank are of that size.
    assert re.search(r"0\s*5\s*32\.6 ms\s*35\.6 ms\s*35\.6 ms\s*37\.2 ms", shown), shown


def test_a_job_is_named_by_its_id_its_folder_or_latest(failed: Path, tmp_path: Path, report: Report) -> None:
    logs = str(failed.parent)
    for arguments in ([failed.name, "--log-dir", logs], [str(failed)], ["latest", "--log-dir", logs]):
        assert report(*arguments, "-o", "page.html", cwd=tmp_path) == (0, "page.html\n", "")
        assert failed.name in (tmp_path / "page.html").read_text()
    assert report(".", "-o", "page.html", cwd=failed) == (0, "page.html\n", "")
    (failed / "page.html").unlink()
    assert report(failed.name, cwd=failed.parent) == (0, f"{failed.name}/report.html\n", "")
    for arguments, sentence in (
        (["zzzz"], "job zzzz: it does not run here and has no logs in dadt-logs"),
        (["./zzzz"], "./zzzz: there is no such folder"),
        (["--log-dir", "none"], "there are no logs of a job in none"),
        ([str(tmp_path)], "holds nothing of a job of dadt's"),
        ([str(failed), "-o", "none/page.html"], "none/page.html: cannot be written (No such file or directory)"),
    ):
        code, _, said = report(*arguments, cwd=tmp_path)
        assert code == 2 and sentence in said and said.count("\n") == 1


def test_without_a_report_events_are_told(copy: Path) -> None:
    (copy / "report.json").unlink()
    shown = read(copy)
    assert "report.json is not there (its launcher was killed before" in shown.sections["missing"]
    assert "Rank 1 failed first" in shown.sections["failure"] and f"ValueError: {EVIL}" in shown.sections["failure"]
    assert "2 workers on this host" in shown.sections[""] and "failed, exit code 1" in shown.sections[""]
    assert "rank 0: 80" in shown.sections["progress"]
    running = read(copy, running=True)
    assert "no workers have been placed yet" in running.sections["missing"] and "still runs" in running.sections[""]


def test_where_the_launcher_was_killed_its_last_report_is_told(copy: Path) -> None:
    told = json.loads((copy / "report.json").read_text())
    told |= {"seconds": 0.5, **dict.fromkeys(["end", "exit_code", "signal", "error", "failure"])}
    (copy / "report.json").write_text(json.dumps(told))
    events = (copy / "events.jsonl").read_text().splitlines(keepends=True)
    (copy / "events.jsonl").write_text(
        "".join(line for line in events if json.loads(line)["kind"] in ("start", "placed"))
    )
    shown = read(copy)
    assert "its launcher was killed: this is what it last wrote" in shown.sections["missing"]
    assert "end not known" in shown.sections[""] and "median" in shown.sections["step-times"]
    duration = float(re.search(r"duration\s*([\d.]+) s", shown.sections[""])[1])
    assert duration > 1.5  # as long as the ranks were heard of
    assert "missing" not in read(copy, running=True).sections


@pytest.mark.parametrize("name", ["report.json", "events.jsonl", "progress.jsonl", "rank1.log"])
@pytest.mark.parametrize("damage", ["gone", "empty", "half", "noise", "folder"])
def test_a_damaged_file_is_named_and_the_rest_is_shown(copy: Path, name: str, damage: str) -> None:
    path = copy / name
    content = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "gone":
        noise = random.Random(0).randbytes(300)
        half = content[: len(content) // 2 + 7].rstrip(b"}\n")  # within a line, wherever its middle is
        path.write_bytes({"empty": b"", "half": half, "noise": noise}[damage])
    shown = read(copy)
    told = shown.text if name == "rank1.log" else shown.sections.get("missing", "")
    if damage != "empty" or name == "report.json":
        assert name in told
    assert failed_is_shown(shown) or name in ("report.json", "events.jsonl")


def failed_is_shown(shown: Page) -> bool:
    return "Rank 1 failed first" in shown.sections.get("failure", "")


def wrong(value: Any, draw: random.Random) -> Any:
    """One value of it, at any depth, made something else."""
    others: list[Any] = [None, -1, 1e300, 10**400, math.nan, math.inf, "x", True, [], {}, [None], {"x": [1]}, [[1]]]
    if not isinstance(value, dict | list) or not value or draw.random() < 0.3:
        return draw.choice(others)
    key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
    changed: Any = dict(value) if isinstance(value, dict) else list(value)
    changed[key] = wrong(value[key], draw)
    return changed


@pytest.mark.parametrize("name", ["report.json", "events.jsonl", "progress.jsonl"])
def test_values_of_the_wrong_kind_end_nothing(copy: Path, name: str) -> None:
    path = copy / name
    sound = json.loads(path.read_text()) if name == "report.json" else list(map(json.loads, path.open()))
    if name == "report.json":
        assert set(REPORT) <= set(sound)
    draw = random.Random(name)
    for _ in range(25):
        changed = wrong(sound, draw)
        lines = changed if isinstance(changed, list) and name != "report.json" else [changed]
        path.write_text("\n".join(map(json.dumps, lines)))
        assert failed_is_shown(read(copy)) or name != "progress.jsonl"


def test_losses_and_restarts_have_a_part_of_their_own(copy: Path) -> None:
    assert "borne" not in read(copy).sections
    told = [
        {"kind": "regroup", "lost": [1], "left": [0], "why": "rank 1 was killed"},
        {"kind": "join", "rank": 1, "pid": 7, "host": ""},
        {"kind": "restart", "count": 1, "why": "worker 0 failed"},
        {"kind": "said", "rank": 0, "text": "resumed: 100 steps replayed"},
    ]
    with (copy / "events.jsonl").open("a") as file:
        file.writelines(json.dumps({"time": time.time(), **event}) + "\n" for event in told)
    shown = read(copy).sections["borne"]
    for text in ("rank 1 was killed", "a new worker has taken its place", "restart 1: worker 0", "resumed: 100 steps"):
        assert text in shown
    assert "learning rate" not in shown


def test_a_job_of_many_ranks_has_a_band(copy: Path) -> None:
    moments = [json.loads(line) for line in (copy / "progress.jsonl").read_text().splitlines()]
    of_one = [moment for moment in moments if moment["rank"] == 0]
    many = [{**m, "rank": rank, "samples": m["samples"] * (1 + rank)} for rank in range(40) for m in of_one]
    (copy / "progress.jsonl").write_text("\n".join(map(json.dumps, many)))
    shown = read(copy).sections["progress"]
    assert "median of 40 ranks" in shown
    assert "rank 0, the least: 80" in shown and "rank 39, the most: 3,200" in shown


def test_the_timeline_of_another_job_is_none_of_this(copy: Path, tmp_path: Path) -> None:
    told = json.loads((copy / "report.json").read_text())
    told["config"]["timeline"] = str(tmp_path / "out.json")
    told["end"] += 3600
    (copy / "report.json").write_text(json.dumps(told))
    assert "is not here" in read(copy).sections["timeline"]
    (tmp_path / "out.json").write_text("[]")
    assert "this is no timeline of dadt" in read(copy).sections["timeline"]
    told["end"] -= 7200
    (copy / "report.json").write_text(json.dumps(told))
    assert "it is another one's" in read(copy).sections["timeline"]


def browse(*arguments: str, home: Path) -> bytes:
    """Chromium, as it is: the page's elements, or a picture."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={home}"]
    return subprocess.run(["chromium", *options, *arguments], capture_output=True, timeout=PATIENCE, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize(("colours", "background"), [(1, (247, 247, 245)), (0, (15, 18, 22))], ids=["light", "dark"])
def test_in_a_browser(
    failed: Path, tmp_path: Path, report: Report, colours: int, background: tuple[int, int, int]
) -> None:
    """Its text is there, it is no wider than a phone, and the lines of the charts have their colours."""
    from matplotlib.image import imread

    file = tmp_path / "page.html"
    assert report(str(failed), "-o", str(file), cwd=tmp_path)[0] == 0
    # A phone is narrower than the narrowest window: a frame is as wide as it likes.
    width = "document.title = contentDocument.documentElement.scrollWidth"
    (tmp_path / "phone.html").write_text(f'<iframe src="page.html" width="360" height="3000" onload="{width}">')
    options = ["--allow-file-access-from-files", f"--blink-settings=preferredColorScheme={colours}"]
    seen = browse("--dump-dom", *options, f"file://{tmp_path / 'phone.html'}", home=tmp_path / "home").decode()
    assert "<title>360</title>" in seen
    seen = browse("--dump-dom", *options, f"file://{file}", home=tmp_path / "home").decode()
    assert failed_is_shown(Page(seen)) and "rank 0: 80" in seen
    picture = tmp_path / "page.png"
    size = "--window-size=1000,2400"
    browse(f"--screenshot={picture}", size, *options, f"file://{file}", home=tmp_path / "home")
    pixels = (imread(picture)[:, :, :3] * 255).round().astype(int)
    assert pixels.shape[:2] == (2400, 1000)
    assert tuple(pixels[5, 5]) == background
    lines = {1: [(31, 111, 201), (217, 101, 11)], 0: [(91, 166, 245), (245, 147, 66)]}[colours]
    for colour in lines:
        assert (pixels == colour).all(axis=2).sum() > 200, colour
