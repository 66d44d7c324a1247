"""The command line itself: quick, and documented from the knobs."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
from run import DADT

import dadt
from dadt.config import Config, flag


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DADT, *arguments], capture_output=True, text=True, timeout=60)


def test_help_imports_neither_torch_nor_numpy_nor_rich():
    program = (
        "import sys\nfrom dadt_cli import main\nsys.argv = ['dadt', '--help']\n"
        "try: main()\nfinally: print(sorted({'torch', 'numpy', 'rich', 'psutil'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_takes_little_longer_than_python_itself():
    def seconds(command: list[str]) -> float:
        begin = time.monotonic()
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        return time.monotonic() - begin

    bare = [sys.executable, "-c", "import click, json, subprocess"]
    ratio = min(seconds([*DADT, "--help"]) for _ in range(5)) / min(seconds(bare) for _ in range(5))
    assert ratio < 3


def test_version():
    assert call("--version").stdout == f"dadt, version {dadt.__version__}\n"


def test_every_knob_has_a_flag_and_the_advanced_ones_are_listed_on_demand():
    short = call("run", "--help").stdout
    long = call("run", "--help-all").stdout
    for field in fields(Config):
        assert flag(field.name) in long
        shown = re.search(rf" {flag(field.name)}(?![\w-])", short) is not None
        assert shown != field.metadata["advanced"], field.name


def test_without_a_command_help_is_shown():
    done = call()
    assert done.returncode == 2
    assert "Commands:" in done.stdout + done.stderr


def test_an_unknown_command_is_one_sentence():
    done = call("rnu")
    assert done.returncode == 2
    assert done.stderr.startswith("dadt: No such command 'rnu'")
    assert done.stderr.count("\n") == 1


FIRST_STEP = """\
import os, time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model(torch.randn(8, 4)).sum().backward()
optimizer.step()
if os.environ["RANK"] == "0": print("seconds", time.time() - float(os.environ["BEGIN"]))
"""


@pytest.mark.slow
def test_the_first_step_comes_about_as_soon_as_with_torchrun(tmp_path):
    (tmp_path / "train.py").write_text(FIRST_STEP)

    def seconds(command: list[str]) -> float:
        env = {**os.environ, "BEGIN": str(time.time())}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        return float(done.stdout.rpartition("seconds ")[2])

    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "train.py"]
    pairs = [(seconds([*DADT, "run", "-np", "2", "train.py"]), seconds(torchrun)) for _ in range(3)]
    assert statistics.median(ours / theirs for ours, theirs in pairs) < 1.2
