"""Each example learns: by two workers in little time, and, in longer tests, as its page says."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbclient
import nbformat
import numpy as np
import pytest
import torch
from harness import ROOT, forkserver
from harness.patience import PATIENCE
from PIL import Image
from test_page import pattern

pytestmark = pytest.mark.timeout(1020)
DADT = [sys.executable, "-m", "dadt_cli", "run", "-np", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
BLOCK = re.compile(r"^```console\n\$ dadt run -np 2 examples/(\w+)\.py (.*)\n((?:.+\n)+)```$", re.M)
PAGE = {name: (arguments, shown) for name, arguments, shown in BLOCK.findall((ROOT / "docs/examples.md").read_text())}
"""What docs/examples.md says: each script's arguments that make it small, and what it prints then."""
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run(launcher, name, arguments) -> all that the example printed; it must succeed."""

    def go(launcher: list[str], name: str, arguments: str) -> str:
        done = subprocess.run(
            [*launcher, str(ROOT / "examples" / f"{name}.py"), *arguments.split()],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=8 * PATIENCE,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return go


def last(pattern: str, text: str) -> float:
    found = re.findall(pattern, text)
    assert found, text
    return float(found[-1])


def learned(name: str, text: str) -> bool:
    """Whether the figure that it prints at the end is one that only training gives."""
    if name == "char_gpt":
        return last(r"held out: loss ([\d.]+) nats", text) < 3.1  # 3.35 with the frequency of each letter
    if name == "bert_classify":
        most = last(r"most frequent speaker ([\d.]+)", text)
        return last(r"held out: accuracy ([\d.]+)", text) > most + 0.05
    if name == "gan":
        return last(r"([\d.]+) now", text) < last(r"([\d.]+) before", text) / 2
    return last(r"accuracy ([\d.]+)", text) > (0.8 if name in ("data_parallel", "torch_backend") else 0.3)


def of_rank(rank: int, text: str) -> list[str]:
    """What it found of the model that all ranks have, on data that all ranks have."""
    return re.findall(rf"^\[{rank}\] .*(?:accuracy|held out: loss) ([\d.]+)", text, re.M)


def test_the_page_has_all() -> None:
    scripts = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert scripts == {*PAGE, "mnist", "mnist_api", "horovod_mnist", "keras_mnist"}  # these are in test_example.py


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGE)
def test_by_two_workers(run: Run, tmp_path: Path, name: str) -> None:
    arguments, shown = PAGE[name]
    text = run([forkserver.dadt(), "run", "-np", "2"], name, arguments)
    assert learned(name, text), text
    printed = {pattern(line) for line in text.splitlines()}
    assert not [line for line in shown.splitlines() if line != "..." and pattern(line) not in printed], text
    assert "NOT distributed" not in text
    assert re.search(r"dadt: done in .*?: \d+ steps, \d+ of them delayed by one", text), text
    if name in ("char_gpt", "bert_classify", "imagenet", "data_parallel"):
        assert of_rank(0, text) == of_rank(1, text) != [], text
    if name == "gan":
        assert (tmp_path / "gan.pgm").read_bytes().startswith(b"P5 224 224 255\n")
    else:
        saved = name in ("char_gpt", "imagenet", "ddp_cifar", "data_parallel")
        assert (tmp_path / f"{name}.pt").exists() == saved


@pytest.mark.slow
def test_the_notebook(tmp_path: Path) -> None:
    path = ROOT / "examples" / "notebook.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    (tmp_path / "data").symlink_to(path.parent / "data")
    nbclient.NotebookClient(notebook, timeout=PATIENCE, resources={"metadata": {"path": str(tmp_path)}}).execute()
    *_, training, result = (
        "".join(out["text"] for out in cell.outputs if out.get("name") == "stdout") for cell in cells
    )
    assert re.search(r"^\[0\] epoch 2 .* accuracy", training, re.M), training
    assert "equal weights: True" in result
    assert last(r"accuracy: ([\d.]+)", result) > 0.85


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGE)
def test_in_plain_python(run: Run, name: str) -> None:
    text = run([sys.executable], name, PAGE[name][0])
    assert learned(name, text), text
    assert name == "torch_backend" or "dadt" not in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp_cifar", "torch_backend"])
def test_by_torchrun(run: Run, name: str) -> None:
    assert learned(name, run(TORCHRUN, name, PAGE[name][0]))


@pytest.mark.slow
def test_the_gpt_reaches_what_its_page_says(run: Run) -> None:
    text = run(DADT, "char_gpt", "--steps 500")
    assert last(r"held out: loss ([\d.]+) nats", text) < 2.0


@pytest.mark.slow
def test_bert_tells_four_speakers_apart(run: Run) -> None:
    text = run(DADT, "bert_classify", "")
    assert last(r"held out: accuracy ([\d.]+)", text) > last(r"most frequent speaker ([\d.]+)", text) + 0.2


@pytest.mark.slow
def test_a_training_that_was_killed_goes_on_where_it_was(run: Run, tmp_path: Path) -> None:
    """As if nothing had happened: to the same weights, bit for bit."""
    small = PAGE["imagenet"][0].replace("--epochs 4", "--epochs 6")
    run(DADT, "imagenet", f"{small} --checkpoint whole.pt")
    command = [*DADT, str(ROOT / "examples" / "imagenet.py"), *f"{small} --checkpoint killed.pt".split()]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if line.startswith("[0] epoch 4"):
                break
        job.kill()
    text = run(DADT, "imagenet", f"{small} --checkpoint killed.pt --resume")
    assert re.search(r"\[0\] goes on from killed.pt, after epoch [345]\n", text), text
    whole, killed = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "killed"))
    assert whole["epoch"] == killed["epoch"] == 6
    assert all(torch.equal(value, killed["model"][name]) for name, value in whole["model"].items())


@pytest.mark.slow
def test_folders_of_images(run: Run, tmp_path: Path) -> None:
    """Stripes that stand and stripes that lie, in JPEGs of several sizes, read by processes of the loader."""
    random = np.random.default_rng(0)
    for part, count in (("train", 64), ("val", 32)):
        for kind in ("lying", "standing"):
            folder = tmp_path / "images" / part / kind
            folder.mkdir(parents=True)
            for index in range(count):
                height, width = random.integers(40, 80, 2)
                y, x = np.indices((height, width))
                stripes = np.sin((y if kind == "lying" else x) * 0.7 + random.uniform(0, 6)) * 60 + 128
                pixels = stripes[..., None] + random.normal(0, 40, (height, width, 3))
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{index}.jpg")
    small = "images --size 32 --depth 1 1 1 1 --width 8 --lr 0.1 --epochs 8 --batch-size 16 --workers 1"
    assert last(r"accuracy ([\d.]+)", run(DADT, "imagenet", small)) > 0.8


@pytest.mark.slow
def test_files_of_cifar(run: Run, tmp_path: Path) -> None:
    """In the format of the version for Python: rows of 3,072 bytes, and a list of labels."""
    random = np.random.default_rng(0)
    patterns = random.integers(0, 256, (10, 3072))
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        labels = random.integers(0, 10, 200)
        data = (patterns[labels] / 2 + random.integers(0, 128, (200, 3072))).astype(np.uint8)
        (tmp_path / name).write_bytes(pickle.dumps({"data": data, "labels": labels.tolist()}, protocol=2))
    text = run(DADT, "ddp_cifar", f"--data {tmp_path} --width 8 --epochs 5")
    assert last(r"accuracy ([\d.]+)", text) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGE)
def test_missing_data_is_told_in_a_line(tmp_path: Path, name: str) -> None:
    arguments = ["nowhere"] if name == "imagenet" else ["--data", "nowhere"]
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert re.fullmatch(r"no \w+\S* .*nowhere.*\n", done.stderr), done.stderr
