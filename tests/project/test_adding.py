"""CONTRIBUTING.md says what it takes to add an algorithm, an executor, a launcher: one file and one line."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from harness import ROOT
from harness.patience import PATIENCE

from dadt import _core

BLOCKS = re.findall(r"```python\n# (\S+?)(?:, in (\w+))?\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
TRAIN = """
import torch, dadt
assert dadt.__file__.startswith({site!r}), dadt.__file__
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(8, 3)).square().mean().backward()
    optimizer.step()
print("weights", model.weight.tolist())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source in an environment of its own, with what the page adds."""
    folder = tmp_path_factory.mktemp("adding") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=PATIENCE)
    site = next((folder / "lib").glob("python*/site-packages"))
    for package in ("dadt", "dadt_cli"):
        shutil.copytree(ROOT / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(_core.__file__, site / "dadt")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        mine = path.name.startswith("dadt-") or "dadt" not in path.name  # not the editable install
        if mine and path.suffix != ".pth" and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    for path, table, text in BLOCKS:
        if table:
            before = (site / path).read_text()
            after = re.sub(rf"^{table} = \{{\n", lambda found, text=text: found[0] + text, before, flags=re.MULTILINE)
            assert after != before, f"there is no {table} in {path}"
            (site / path).write_text(after)
        else:
            assert not (site / path).exists()
            (site / path).write_text(text)
    return site


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--algorithm", "--executor", "--launcher"])
def test_one_file_and_one_line(flag: str, site: Path, tmp_path: Path) -> None:
    assert len(BLOCKS) == 6
    (tmp_path / "train.py").write_text(TRAIN.format(site=str(site)))
    python = site.parents[2] / "bin" / "python"
    command = [python, "-m", "dadt_cli", "run", "-np", "2", "--output", "all", flag, "mine", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    weights = re.findall(r"weights (.*)", done.stdout)
    assert len(weights) == 2 and weights[0] == weights[1], done.stdout
    if flag != "--launcher":
        assert f"{flag[2:]} mine" in done.stderr
