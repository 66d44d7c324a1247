"""Every optimizer that some packages export, over a small model: docs/compatibility.md says what becomes of each."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent
PYTHON = PROGRAMS.parents[1] / ".venv-programs" / "bin" / "python"
PAGE = PROGRAMS.parents[1] / "docs" / "compatibility.md"


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.is_file(), reason="needs `make .venv-programs/installed`")
@pytest.mark.timeout(3600)
def test_optimizers(tmp_path: Path) -> None:
    """As alone with `sync` but for rounding, equal on all ranks, late or told why not, or refused with a sentence."""
    command = [str(PYTHON), str(PROGRAMS / "optimizers" / "sweep.py"), "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["found"]) > 190
    assert found["table"] in PAGE.read_text()
