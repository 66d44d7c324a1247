"""The examples are plain scripts: they import no dadt, run under plain python, and learn under both."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, forkserver
from harness.patience import PATIENCE

SCRIPT = ROOT / "examples" / "mnist.py"


def accuracies(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"epoch \d+  loss [\d.]+  accuracy ([\d.]+)", output)]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


PLAIN = ["mnist", "char_gpt", "bert_classify", "imagenet", "gan", "data_parallel", "ddp_cifar"]


@pytest.mark.parametrize("name", PLAIN)
def test_it_knows_nothing_of_dadt(name: str) -> None:
    nodes = list(ast.walk(ast.parse((ROOT / "examples" / f"{name}.py").read_text())))
    names = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    names |= {str(n.module) for n in nodes if isinstance(n, ast.ImportFrom)}
    assert "torch" in names
    assert not [each for each in names if each.startswith(("dadt", "torchvision"))]
    assert ("torch.distributed" in names) == (name == "ddp_cifar")


def test_plain_python(tmp_path: Path) -> None:
    done = run([forkserver.python(), str(SCRIPT), "--epochs", "1"], tmp_path)
    assert done.returncode == 0, done.stdout
    assert "dadt" not in done.stdout
    assert accuracies(done.stdout)[-1] > 0.85
    assert (tmp_path / "mnist.pt").exists()


def test_wrong_folder_gets_one_sentence(tmp_path: Path) -> None:
    done = run([forkserver.python(), str(SCRIPT), "--data", "nowhere"], tmp_path)
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1
    assert "no digits in nowhere" in done.stdout


@pytest.mark.parametrize("optimizer", ["adadelta", pytest.param("sgd", marks=pytest.mark.slow)])
def test_two_workers(tmp_path: Path, optimizer: str) -> None:
    # One seed: what is learned in so few steps differs by a point from one to the next.
    command = [forkserver.dadt(), "run", "-np", "2", "--seed", "0", str(SCRIPT), "--optimizer", optimizer]
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stdout
    assert "189 steps, 139 of them delayed by one" in done.stdout
    assert accuracies(done.stdout)[-1] >= 0.95
    assert (tmp_path / "mnist.pt").exists()
    assert [p.name for p in tmp_path.glob(".*")] == []


@pytest.mark.slow  # tests/data/test_script.py has it of a smaller one
def test_sync_divided_among_two_workers_learns_as_one_process_does(tmp_path: Path) -> None:
    seeded = ["--seed", "7"]  # dropout draws its numbers per rank
    command = [sys.executable, "-m", "dadt_cli", "run", "-np", "2", *seeded, "--algorithm", "sync", "--batch", "global"]
    divided = run([*command, str(SCRIPT), "--epochs", "1", "--optimizer", "sgd"], tmp_path)
    alone = run([sys.executable, str(SCRIPT), "--epochs", "1", "--optimizer", "sgd"], tmp_path)
    assert divided.returncode == alone.returncode == 0, divided.stdout
    assert "125 steps, none delayed" in divided.stdout
    assert accuracies(divided.stdout)[-1] == pytest.approx(accuracies(alone.stdout)[-1], abs=0.03)


API_SCRIPT = ROOT / "examples" / "mnist_api.py"


@pytest.mark.slow
def test_the_one_with_the_api_in_plain_python(tmp_path: Path) -> None:
    done = run([sys.executable, str(API_SCRIPT), "--epochs", "1"], tmp_path)
    assert done.returncode == 0, done.stdout
    assert accuracies(done.stdout)[-1] > 0.85
    assert (tmp_path / "mnist.pt").exists()


def test_the_one_with_the_api_by_two_workers(tmp_path: Path) -> None:
    dadt = [forkserver.dadt(), "run", "-np", "2"]
    done = run([*dadt, str(API_SCRIPT), "--epochs", "1"], tmp_path)
    assert done.returncode == 0, done.stdout
    assert "63 steps, 13 of them delayed by one" in done.stdout
    (accuracy,) = accuracies(done.stdout)
    assert accuracy > 0.85


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("workers", [2, 1])
def test_the_one_of_keras(tmp_path: Path, workers: int) -> None:
    script = ROOT / "examples" / "keras_mnist.py"
    assert "dadt" not in script.read_text().split('"""')[2]
    dadt = ["-m", "dadt_cli", "run", "-np", "2"] if workers > 1 else []
    done = run([sys.executable, *dadt, str(script), "--epochs", "2"], tmp_path)
    assert done.returncode == 0, done.stdout
    found = re.findall(r"^(?:\[\d\] )?accuracy ([\d.]+)$", done.stdout, re.MULTILINE)
    assert len(found) == workers and len(set(found)) == 1 and float(found[0]) > 0.85, done.stdout
    assert (tmp_path / "mnist.keras").exists()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [[], ["--fp16-allreduce", "--gradient-predivide-factor", "2.0"], ["--use-adasum"]])
def test_the_one_for_horovod_by_two_workers(tmp_path: Path, options: list[str]) -> None:
    script = ROOT / "examples" / "horovod_mnist.py"
    assert "dadt" not in script.read_text().split('"""')[2]
    dadt = [sys.executable, "-m", "dadt_cli", "run", "-np", "2"]
    done = run([*dadt, str(script), "--epochs", "1", *options], tmp_path)
    assert done.returncode == 0, done.stdout
    (accuracy,) = accuracies(done.stdout)
    assert accuracy > (0.8 if "--use-adasum" in options else 0.85)
    assert (tmp_path / "mnist.pt").exists()
