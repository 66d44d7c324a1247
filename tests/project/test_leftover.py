"""The check for leftovers finds what tests leave behind, and fails the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from harness import TESTS
from harness.patience import PATIENCE

LEAVES_A_PROCESS = """
import subprocess, sys
def test_leaves_a_process():
    program = "import time; print(flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()  # before it runs, its environment does not show
    open("pid", "w").write(str(child.pid))
"""
LEAVES_A_SEGMENT = """
def test_leaves_a_segment():
    open("shared-memory/dadt-test-leftover", "wb").write(b"x")
"""


def run_pytest(folder: Path, test: str, *options: str) -> subprocess.CompletedProcess[str]:
    """With folders of its own in place of the machine's, where other tests make files at the same time."""
    own = {
        "SETTLE_SECONDS = 20.0": "SETTLE_SECONDS = 0.5",
        'SHARED_MEMORY = Path("/dev/shm")': f'SHARED_MEMORY = Path("{folder / "shared-memory"}")',
        'JOBS = Path(f"/tmp/dadt-{os.getuid()}")': f'JOBS = Path("{folder / "jobs"}")',
    }
    (folder / "shared-memory").mkdir()
    for path in [TESTS / "conftest.py", *(TESTS / "harness").glob("*.py")]:
        copy = folder / path.relative_to(TESTS)
        copy.parent.mkdir(exist_ok=True)
        text = path.read_text()
        for ours, its in own.items():
            text = text.replace(ours, its)
        copy.write_text(text)
    (folder / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_process_left_behind_fails_the_run(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run_pytest(tmp_path, LEAVES_A_PROCESS, *options)
    left = psutil.Process(int((tmp_path / "pid").read_text()))
    left.kill()
    assert done.returncode == 1, done.stdout
    assert "1 passed" in done.stdout
    assert f"process {left.pid}" in done.stdout


def test_a_segment_left_behind_fails_the_run(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, LEAVES_A_SEGMENT)
    assert done.returncode == 1, done.stdout
    assert f"{tmp_path}/shared-memory/dadt-test-leftover: nobody uses it" in done.stdout


def test_a_clean_run_passes(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "def test_nothing(): pass", "-n", "1")
    assert done.returncode == 0, done.stdout
    assert "left behind" not in done.stdout
