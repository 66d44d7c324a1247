"""An algorithm of the user's own: the one that docs/extending.md shows, and what cannot be one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, forkserver
from harness.patience import PATIENCE

from dadt.algorithms import find
from dadt.errors import ConfigError

PAGE = (ROOT / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", PAGE, re.S))


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [forkserver.dadt(), "run", "-np", "2", *options, "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert set(FILES) == {"spikes.py", "train.py"}
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.slow
def test_the_example_leaves_out_what_sync_falls_for(folder: Path) -> None:
    """That it runs and prints what the page shows is tested in test_page.py."""
    script = folder / "train.py"
    script.write_text(script.read_text().replace("range(40)", "range(31)"))
    skipped, plain = run(folder, "--algorithm", "spikes:SkipSpikes"), run(folder, "--algorithm", "sync")
    for done in (skipped, plain):
        assert done.returncode == 0, done.stderr
    largest = [re.findall(r"largest weight ([\d.]+)", done.stdout) for done in (skipped, plain)]
    assert len(largest[0]) == 2 and all(float(found) < 2 for found in largest[0])
    assert all(float(found) > 100 for found in largest[1])
    assert skipped.stderr.count("is left out") == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("spikes:Skips", "spikes.py has no Skips"),
        ("broken:Any", "broken cannot be imported: ZeroDivisionError: division by zero"),
        ("wrong:Any", "wrong.py cannot be read: "),
        ("spikes", "choose one of pipe, sync"),
    ],
)
def test_what_is_no_algorithm_is_one_sentence(folder: Path, name: str, why: str) -> None:
    (folder / "broken.py").write_text("Any = 1 / 0\n")
    (folder / "wrong.py").write_text("class Any(:\n")
    done = run(folder, "--algorithm", name)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    said = [line for line in done.stderr.splitlines() if why in line]
    assert len(said) == 1 and f"--algorithm {name}: " in said[0], done.stderr


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere:Any", "there is no module nowhere"),
        ("spikes:Skips", "spikes has no Skips"),
        ("spikes:statistics", "statistics is no subclass of dadt.algorithms.Algorithm"),
    ],
)
def test_what_a_worker_finds_to_be_none(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str) -> None:
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "spikes", None)  # so that it is forgotten afterwards
    del sys.modules["spikes"]
    with pytest.raises(ConfigError) as caught:
        find(name)
    assert str(caught.value).startswith(f"--algorithm {name}: {why}")
