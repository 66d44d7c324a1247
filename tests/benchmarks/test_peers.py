"""The page of `make bench-peers`: targets and tables come of the rounds that were measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT
from harness.patience import PATIENCE

from benchmarks.peers.__main__ import main
from benchmarks.peers.measurement import LINK, MEASUREMENTS, USUAL, contender, exchange
from benchmarks.peers.measurement import found as measured
from benchmarks.peers.page import page
from benchmarks.peers.target import TARGETS, Target, slow_link, speed, verdict
from dadt_cli.bench.peer import PEERS
from dadt_cli.bench.ratio import Interval

SECONDS = {
    "plain": [0.8, 1.6, 0.8],
    "ddp": [1.2, 2.4, 1.3],
    "ddp-view": [1.1, 2.6, 1.0],
    "pipe": [1.0, 2.0, 1.0],
    "bare": [1.0, 2.0, 1.0],
}


def measurement(seconds: dict[str, list[float]], busy: float = 1.0, limit: float = 0.0) -> dict[str, Any]:
    about = {"when": "2026-11-25", "cpu": "some CPU", "cores": 2, "busy": busy, "torch": "2.13.0"}
    contenders = {name: {"options": [], "seconds": each, "memory": 5e8} for name, each in seconds.items()}
    model = {"model": "resnet50", "source": "", "parameters": 25_000_000, "batch": 3, "accumulate": 1, "threads": 1}
    how = {"rounds": 3, "steps": 2, "options": ["--link", "1gbit"], "ranks": 2, "minutes": 4.0, "exchange": limit}
    notes = ["horovod is left out: it is not here"]
    return {"title": "ResNet50", "conditions": about, "contenders": contenders, "notes": notes, **model, **how}


def rows(text: str) -> dict[str, list[str]]:
    """Cells of all tables of a page, by the first of a row, or by the contender in the table of measurements."""
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {rest[0] if first in MEASUREMENTS else first: rest for first, *rest in cells}


def test_each_target_is_computed_from_the_rounds_and_judged() -> None:
    text = page({"resnet50": measurement(SECONDS), "asleep-even": measurement(SECONDS, limit=0.95)}, {})
    found = rows(text)
    # ddp-view has the better median; its ratios to pipe are 1.1, 1.3 and 1.0, round by round.
    assert found["resnet50: speed of pipe over DDP's"] == ["1.15", "1.10", "1.10 (1.00 to 1.30)", "not by its median"]
    assert found["resnet50: speed of pipe over plain's"] == ["0.85", "0.80", "0.80 (0.80 to 0.80)", "no"]
    assert found["resnet50: speed of pipe over Horovod's"][1:] == ["", "", "not measured"]
    assert found["resnet101: speed of pipe over DDP's"][1:] == ["", "", "not measured"]
    # A link that needs 0.95 s lets nobody be faster.
    limited = found["asleep-even: speed of pipe over plain's, or what the link allows"]
    assert limited[1:] == ["0.95", "0.95 (0.80 to 0.95)", "by its median"]
    assert found["pipe"][1:4] == ["1000 (1000 to 2000)", "0.80 (0.80 to 0.80)", "1.10 (1.00 to 1.30)"]
    assert found["plain"][2] == found["ddp-view"][3] == "1"
    assert "no results" not in text


def test_a_busy_machine_is_told_of_first() -> None:
    text = page({"resnet50": measurement(SECONDS, busy=55.0)}, {})
    assert "these figures are no results" in text.partition("|")[0] and "55 % before resnet50" in text


@pytest.mark.parametrize(
    ("found", "forgiving", "word"),
    [
        (Interval(1.2, 1.1, 1.3), False, "yes"),
        (Interval(1.2, 1.0, 1.3), False, "by its median"),
        (Interval(1.0, 0.9, 1.3), False, "not by its median"),
        (Interval(1.0, 0.9, 1.05), False, "no"),
        (Interval(1.0, 0.9, 1.3), True, "yes"),
        (None, True, "not measured"),
    ],
)
def test_verdicts_go_by_the_interval(found: Interval | None, forgiving: bool, word: str) -> None:
    assert verdict(Target("any", ("ddp",), 1.1, forgiving=forgiving), found) == word


def test_a_loss_that_is_not_reached_is_a_target_missed() -> None:
    row = {"DDP": {"step": 0.1, "seconds": 65.0}, "auto": {"step": 0.01, "seconds": 5.0}}
    never = {**row, "auto": {"step": 0.01, "seconds": None}}
    found = {"slow-link-sgd": slow_link([{"rows": row, "ratio": 28.4}, {"rows": never, "ratio": 35.0}])}
    told = rows(page({}, found))
    assert "waits 28 to 35 times" in page({}, found)
    assert told["slow-link-sgd: speed of auto over that of DDP"][2:] == ["6.50 (0.00 to 13.00)", "not by its median"]
    assert told["slow-link-adam: speed of auto over that of DDP"][3] == "not measured"


def test_targets_are_of_what_is_measured() -> None:
    for target in TARGETS:
        if (asked := MEASUREMENTS.get(target.measurement)) is not None:
            assert {target.mine, *target.others} <= set(asked.contenders.split())
    names = {name for asked in MEASUREMENTS.values() for name in asked.contenders.split()}
    assert {contender(name, 2).peer for name in names} - {""} <= set(PEERS)
    assert speed(measurement(SECONDS), "pipe", ("horovod",)) is None
    assert exchange(100_000_000, 2, LINK) == pytest.approx(0.836, abs=0.001) and exchange(1, 2, ()) == 0.0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--only", "resnet"], "--only resnet: unknown; choose from resnet50, "),
        (["--rounds", "1"], "--rounds 1: an interval needs 2 rounds or more"),
        (["--write", "/no/where.md"], "--write /no/where.md: there is no folder /no"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_asked_for_is_one_sentence(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peers", "--json", "a.json", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(660)
def test_a_measurement_is_made_once_and_goes_on_the_page(tmp_path: Path) -> None:
    study = {name: measurement(SECONDS) for name in USUAL if name != "shm-mlp"}
    (tmp_path / "a.json").write_text(json.dumps(study))
    command = [sys.executable, "-m", "benchmarks.peers", "--rounds", "2"]
    command += ["--json", str(tmp_path / "a.json"), "--write", str(tmp_path / "a.md")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=5 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "a.json").read_text())
    assert set(found) == set(USUAL) and found["resnet50"] == study["resnet50"]
    assert list(found["shm-mlp"]["contenders"]) == MEASUREMENTS["shm-mlp"].contenders.split()
    assert (tmp_path / "a-shm-mlp.png").read_bytes().startswith(b"\x89PNG")
    assert "| shm-mlp | pipe |" in (tmp_path / "a.md").read_text()


@pytest.mark.slow
def test_what_auto_chooses_is_measured_beside_choices_by_hand(tmp_path: Path) -> None:
    asked = MEASUREMENTS["auto-shm"]._replace(contenders="auto sync", steps=4, every=4)
    found = measured(asked, 2, tmp_path / "a.png", print)
    assert list(found["contenders"]) == ["auto", "sync"] and " chooses " in found["choice"]
    assert rows(page({"auto-shm": found}, {}))["auto-shm: speed of auto over the best choice's by hand"][0] == "0.95"
