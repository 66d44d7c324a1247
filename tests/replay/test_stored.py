"""Snapshots whose files are damaged, or made by a stranger, with checksums that are right."""

from __future__ import annotations

import json
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dadt.control import snapshots
from dadt.errors import NotResumed
from dadt.inject.data.seed import State
from dadt.inject.replay import snapshot

TOLD = {
    "step": 12,
    "seed": 3,
    "began": 1.5,
    "members": [0],
    "shares": 1,
    "world": 1,
    "parts": 1,
    "common": True,
    "script": "x",
    "arguments": ["--lr", "1"],
    "next": "y",
}


TRAINING: dict[str, Any] = {
    "prediction": {"looks": 3, "changed": False, "ahead": [], "clip": 1.0, "terms": [[[torch.zeros(4)], 0.5]]},
    "barred": False,
    "owes": [None, {"scale": None, "forgets": False, "owed": torch.zeros(4)}],
    "in_flight": {"not_finite": [0], "learned": {0: []}},
    "follows": False,
    "momentum": {"own": [torch.ones(2), None], "taken": [3, 0], "on_way": [None, None]},
    "idle": {1: torch.ones(2)},
    "algorithm": {
        "before": [1, None],
        "expected": [1],
        "pause": 1,
        "left": 0,
        "watches": True,
        "fragments": {0: {"round": [1, 4, 4, 0, 0], "owes": [None]}},
    },
    "weighing": {"rule": "STEPS", "unit": 8.0, "usual": 0.5},
}
"""What an optimizer's training is."""


def content() -> dict[str, Any]:
    return {
        "step": 12,
        "random": {"own": State.capture().plain()},
        "values": torch.zeros(8, dtype=torch.uint8),
        "variables": {"0 main.loss": torch.zeros(3)},
        "counts": {"0.calls": 3},
        "tensors": {"0.weight": torch.zeros(4)},
        "buffers": {"1.running_mean": torch.zeros(4)},
        "averaged": [[1, ["running_mean"], None, {"running_mean": torch.zeros(4)}]],
        "training": {0: dict(TRAINING)},
        "optimizers": {0: {"state": {0: {"exp_avg": torch.zeros(4)}}, "param_groups": [{"params": [0], "lr": 0.1}]}},
        "schedulers": {2: {"last_epoch": 3}},
        "scalers": {},
    }


def stored(root: Path, held: Any, told: Any = None) -> Path:
    folder = snapshots.folder_of(root, 12)
    folder.mkdir()
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(
        20_000
    )  # as one who writes deep files has it; the pickler in C has another one in Python 3.12
    in_python = SimpleNamespace(__name__="pickle", Pickler=pickle._Pickler)
    torch.save(held, folder / "half", pickle_module=in_python)
    sys.setrecursionlimit(limit)
    snapshots.complete(folder, 0, folder / "half", snapshots.digest(folder / "half"), dict(TOLD))
    if told is not None:
        about = json.loads((folder / "rank0.json").read_text())
        (folder / "rank0.json").write_text(json.dumps({**about, **told}))
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(NotResumed) as error:
        snapshot.read(folder, 0)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    found = snapshot.read(stored(tmp_path, content()), 0)
    assert found.keys() == content().keys() and snapshots.is_whole(snapshots.folder_of(tmp_path, 12))


@pytest.mark.parametrize("name", content())
def test_each_member_is_needed_and_of_its_kind(tmp_path: Path, name: str) -> None:
    lacking = {key: value for key, value in content().items() if key != name}
    (tmp_path / "lacking").mkdir()
    assert f"{name!r} is missing in it" in refused(stored(tmp_path / "lacking", lacking))
    for number, other in enumerate((None, "text", {"x": [2]}, [[]], torch.zeros(2, 2))):
        (tmp_path / str(number)).mkdir()
        assert f"{name!r} in it is not what" in refused(stored(tmp_path / str(number), {**content(), name: other}))


@pytest.mark.parametrize("name", TRAINING)
def test_each_part_of_a_ranks_training_is_needed_and_of_its_kind(tmp_path: Path, name: str) -> None:
    held = content()
    within = {"prediction": {"looks": "x"}, "owes": [{"owed": torch.zeros(4, dtype=torch.uint8)}]}
    within |= {
        "in_flight": {"learned": 3},
        "algorithm": {"fragments": {0: {"round": [1], "owes": [None]}}},
        "weighing": {**TRAINING["weighing"], "unit": 0.0},
    }
    for number, other in enumerate((None, "text", 7, torch.zeros(2), within.get(name, []))):
        (tmp_path / str(number)).mkdir()
        held["training"] = {0: {**TRAINING, name: other}}
        assert "'training' in it is not what" in refused(stored(tmp_path / str(number), held))
    (tmp_path / "lacking").mkdir()
    held["training"] = {0: {key: value for key, value in TRAINING.items() if key != name}}
    assert "'training' in it is not what" in refused(stored(tmp_path / "lacking", held))


def nested(depth: int) -> Any:
    made: Any = 1
    for number in range(depth):
        made = [made] if number % 2 else {"x": made}
    return made


def shared(times: int) -> Any:
    made: Any = [1, 2]
    for _ in range(times):
        made = [made, made]
    return made


WHOLE = content()
HOSTILE: dict[str, tuple[Any, str]] = {
    "a list": ([1, 2], "holds no state of a job"),
    "another step": ({**WHOLE, "step": 13}, "is of step 13, and not of 12"),
    "a step that is none": ({**WHOLE, "step": True}, "'step' in it is not what belongs there"),
    "deep": ({**WHOLE, "schedulers": {2: {"x": nested(1000)}}}, "containers 65 deep in each other"),
    "shared": ({**WHOLE, "schedulers": {2: {"x": shared(27)}}}, "holds more values than bytes"),
    "stride 0": ({**WHOLE, "values": torch.zeros(1, dtype=torch.uint8).expand(1 << 40)}, "than are stored"),
    "overlapping": ({**WHOLE, "tensors": {"w": torch.zeros(99).as_strided((50, 50), (1, 1))}}, "than are stored"),
    "words of a generator": (
        {**WHOLE, "random": {"own": {**WHOLE["random"]["own"], "torch": torch.zeros(9, dtype=torch.uint8)}}},
        "'random' in it is not what belongs there",
    ),
    "another rank's name": ({**WHOLE, "random": {"third": WHOLE["random"]["own"]}}, "'random' in it is not"),
    "a number for a tensor": ({**WHOLE, "tensors": {"0.weight": 1.0}}, "'tensors' in it is not"),
    "no groups": ({**WHOLE, "optimizers": {0: {"state": {}}}}, "'optimizers' in it is not"),
    "names for numbers": (
        {**WHOLE, "optimizers": {0: {"state": {}, "param_groups": [{"params": ["w"]}]}}},
        "'optimizers' in it is not",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_sentence(tmp_path: Path, case: str) -> None:
    held, sentence = HOSTILE[case]
    assert sentence in refused(stored(tmp_path, held))


@pytest.mark.parametrize(
    "told",
    [
        *({name: other} for name in TOLD for other in (None, [None], {"x": 1}, 1e999)),
        {"members": [0, 0]},
        {"members": [-1]},
        {"members": []},
        {"shares": 0},
        {"shares": 1 << 40},
        {"began": float("nan")},
        {"size": "1"},
        {"version": [1]},
    ],
)
def test_what_is_told_of_the_job_is_of_its_kind(tmp_path: Path, told: dict[str, Any]) -> None:
    folder = stored(tmp_path, content(), told)
    assert "resum" in refused(folder)
    assert not snapshots.is_whole(folder) and snapshots.newest(tmp_path) is None


def deepen(folder: Path) -> None:
    (folder / "rank0.json").write_text("[" * 100_000)


def pipe_for_the_told(folder: Path) -> None:
    (folder / "rank0.json").unlink()
    os.mkfifo(folder / "rank0.json")


def pipe_for_the_content(folder: Path) -> None:
    (folder / "rank0.pt").unlink()
    os.mkfifo(folder / "rank0.pt")


def of_another_name(folder: Path) -> None:
    (folder / "rank0.json").rename(folder / "rank0x.json")


def compress(folder: Path) -> None:
    with zipfile.ZipFile(folder / "rank0.pt") as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(folder / "half", "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in held.items():
            packed.writestr(name, data)
    snapshots.complete(folder, 0, folder / "half", snapshots.digest(folder / "half"), dict(TOLD))


def no_archive(folder: Path) -> None:
    (folder / "half").write_bytes(b"x" * 1000)
    snapshots.complete(folder, 0, folder / "half", snapshots.digest(folder / "half"), dict(TOLD))


@pytest.mark.parametrize(
    "damage", [deepen, pipe_for_the_told, pipe_for_the_content, of_another_name, compress, no_archive]
)
def test_damaged_folders(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = stored(tmp_path, content())
    damage(folder)
    assert refused(folder)
    snapshots.newest(tmp_path)  # raises nothing
