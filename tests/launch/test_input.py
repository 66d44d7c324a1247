"""Bad input: one sentence that says what is wrong and what to do, exit code 2, and nothing started."""

from __future__ import annotations

import os

import pytest

from dadt.config import Config
from dadt.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-np", "2"], "which script?"),
        (["train.py"], "how many workers?"),
        (["-np", "2", "missing.py"], "missing.py: there is no such script in "),
        (["-np", "2", "/nowhere/missing.py"], "/nowhere/missing.py: there is no such script"),
        (["-np", "2", "python", "missing.py"], "missing.py: there is no such script in "),
        (["-np", "2", "-m", "missing.train"], "-m missing.train: there is no module missing"),
        (["-np", "2", "--predict", "nan", "train.py"], "--predict nan: give auto, own:0.9, a number from 0"),
        (["-np", "2", "--start-timeout", "nan", "train.py"], "--start-timeout nan: give a number"),
        (["-np", "2", "--grace", "inf", "train.py"], "--grace inf: give a number"),
        (["-np", "2", "--orphan-timeout", "1.5", "train.py"], "--orphan-timeout 1.5: must be 2 s or more"),
        (["-np", "2", "-m", "__main__"], "-m __main__: there is no module __main__"),
        (["-np", "2", "x" * 300], "x: "),
        (["-np", "2", "folder"], "folder is a directory"),
        (["-np", "-1", "train.py"], "-np -1: the number of workers must be 1 or more, or 0 for one per slot"),
        (["-np", "-1", "train.py"], "-np -1: the number of workers must be 1 or more"),
        (["-np", "two", "train.py"], "'two' is not a valid integer"),
        (["-np", "2", "python"], "which script?"),
        (["-np", "2", "--no-python", "nothing-like-this"], "nothing-like-this: there is no such executable"),
        (["-np", "2", "-m", "--no-python", "x"], "exclude each other"),
        (["-np", "2", "--executor", "smh", "train.py"], "--executor smh: unknown; choose one of auto, shm"),
        (["-np", "2", "--algoritm", "pipe", "train.py"], "did you mean --algorithm?"),
        (["-np", "2", "--warmup-steps", "-3", "train.py"], "--warmup-steps -3: must be 0 or more"),
        (["-np", "2", "--warmup-steps", "few", "train.py"], "'few' is not a valid integer"),
        (["-np", "2", "--predict", "much", "train.py"], "--predict much: give auto, own:0.9, a number"),
        (["-np", "2", "--share", "first", "train.py"], "--share first: give DataLoaders by number"),
        (["-np", "2", "--output", "rank7", "train.py"], "--output rank7: give once, all, rank0, errors"),
        (["-np", "2", "--output", "7", "train.py"], "--output 7: there is no such rank among 2"),
        (["-np", "2", "--log-dir", "/proc/logs", "train.py"], "--log-dir /proc/logs: cannot be written"),
        (["-np", "2", "--log-dir", "train.py", "train.py"], "--log-dir train.py: cannot be written"),
    ],
)
def test_it_is_refused_in_one_sentence(launch, tmp_path, arguments, said):
    (tmp_path / "folder").mkdir()
    result = launch("open('started', 'w')", *arguments)
    assert result.code == 2, result.err
    assert said in result.err
    assert result.err.startswith("dadt: ")
    assert result.err.count("\n") == 1, result.err
    assert result.out == b""
    assert not (tmp_path / "started").exists()
    assert not list((tmp_path / "dadt-logs").glob("*"))


def test_a_variable_with_a_bad_value_is_named(launch):
    result = launch("", DADT_WARMUP_STEPS="few")
    assert result.code == 2
    assert result.err == "dadt: DADT_WARMUP_STEPS few: give a whole number\n"


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_no_number_of_workers_is_infinite(value):
    with pytest.raises(ConfigError, match=f"DADT_NP {value}: give a whole number"):
        Config.from_env({"DADT_NP": value})


@pytest.fixture
def two_gpus(tmp_path):
    """A machine whose driver's tool lists two GPUs."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: GPU-aa)'\necho 'GPU 1: B (UUID: GPU-bb)'\n")
    tool.chmod(0o755)
    return {"PATH": f"{tool.parent}:{os.environ['PATH']}"}


SHOW = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"


def test_more_workers_than_gpus_are_refused(launch, two_gpus):
    result = launch(SHOW, "-np", "3", "train.py", **two_gpus)
    assert result.code == 2
    assert "only 2 GPUs are visible" in result.err and "--gpu-visibility all" in result.err
    allowed = launch(SHOW, "-np", "3", "--gpu-visibility", "all", "train.py", **two_gpus)
    assert allowed.code == 0
    assert allowed.out.count(b"None") == 3


def test_a_machine_with_two_names_does_not_give_its_gpus_twice(launch, two_gpus):
    result = launch(SHOW, "-H", "localhost:2,127.0.0.1:2", "train.py", **two_gpus)
    assert result.code == 2
    assert "localhost and 127.0.0.1 are one machine" in result.err.splitlines()[-1]
    assert launch(SHOW, "-H", "localhost:2,127.0.0.1:2", "--dry-run", "train.py", **two_gpus).code == 2


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, [b"[0] 0", b"[1] 1"]),
        ("1,0", [b"[0] 1", b"[1] 0"]),
        ("GPU-bb,GPU-aa", [b"[0] GPU-bb", b"[1] GPU-aa"]),
        ("MIG-1/2/3,MIG-4,MIG-5", [b"[0] MIG-1/2/3", b"[1] MIG-4"]),
    ],
)
def test_each_worker_sees_one_gpu(launch, two_gpus, visible, seen):
    env = two_gpus if visible is None else {**two_gpus, "CUDA_VISIBLE_DEVICES": visible}
    result = launch(SHOW, **env)
    assert sorted(result.out.splitlines()) == seen
    assert ", executor shm," in result.err


def test_hidden_gpus_are_none(launch, two_gpus):
    result = launch(SHOW, **two_gpus, CUDA_VISIBLE_DEVICES="-1")
    assert sorted(result.out.splitlines()) == [b"[0] -1", b"[1] -1"]
    assert ", executor shm," in result.err


def test_more_workers_than_cores_get_one_line_of_warning(launch):
    count = len(os.sched_getaffinity(0)) + 1
    result = launch("", "-np", str(count), "train.py")
    assert result.code == 0
    assert result.err.count(f"{count} workers share ") == 1


def test_flags_of_python_that_hide_the_environment_are_warned_of(launch):
    result = launch("", "-np", "1", "python", "-I", "train.py")
    assert result.code == 0
    assert "dadt: warning: python -I ignores the environment" in result.err
    assert "ignores" not in launch("", "-np", "1", "python", "train.py", "-I").err
