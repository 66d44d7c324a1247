"""`import dadt` costs nothing, and dadt.init() works wherever a script may run."""

from __future__ import annotations

import subprocess
import sys

import pytest
from harness.job import run_api as run
from harness.patience import PATIENCE

import dadt
from dadt.api.session import configured
from dadt.config import Config
from dadt.errors import ConfigError

SMALL = """
    dadt.init()
    total = dadt.all_reduce(torch.ones(2) * (dadt.rank() + 1), "sum")
    report([dadt.rank(), dadt.size(), total.tolist(), dadt.allgather_object(dadt.local_rank())])
"""


def test_importing_it_imports_no_torch() -> None:
    code = "import dadt, sys; dir(dadt); dadt.Mismatch; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_name_is_there() -> None:
    for name in dadt.__all__:
        assert getattr(dadt, name) is not None
    assert set(dadt._HOME) <= set(dadt.__all__) <= set(dir(dadt))
    with pytest.raises(AttributeError, match="no attribute 'allreduce'"):
        _ = dadt.allreduce


@pytest.mark.parametrize(
    ("launcher", "first", "np"),
    [
        ("dadt run", "import dadt", 2),
        pytest.param("torchrun", "import dadt", 2, marks=pytest.mark.slow),
        ("torchrun", "import torch, dadt", 2),
        ("python", "import dadt", 1),
    ],
)
def test_launchers(tmp_path, launcher, first, np) -> None:
    python = ["--no-python", sys.executable] if launcher == "torchrun" else []  # for the ranks; itself, it is forked
    done = run(tmp_path, SMALL, *python, launcher=launcher, first=first, np=np, alone=launcher == "python")
    total = np * (np + 1) / 2
    assert done.ranks == [[rank, np, [total, total], list(range(np))] for rank in range(np)]


def test_without_injection(tmp_path) -> None:
    done = run(tmp_path, SMALL, "--inject", "none")
    assert [found[2] for found in done.ranks] == [[3.0, 3.0]] * 2


def test_ranks_that_disagree_about_settings(tmp_path) -> None:
    done = run(tmp_path, "dadt.init(timeout=60 + rank)", code=2)
    assert "--timeout (dadt.init(timeout=)) is 60.0 on rank 0 and 61.0 on rank 1" in done.output


def test_a_rank_that_fails_ends_the_others(tmp_path) -> None:
    script = """
        dadt.init()
        if rank == 1:
            raise RuntimeError("of the script's own")
        dadt.all_reduce(torch.ones(1))
    """
    done = run(tmp_path, script, code=1)
    assert "of the script's own" in done.output


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"cycle_time": 3}, r"dadt\.init\(cycle_time=\): unknown; choose of algorithm, horovod, executor"),
        ({"np": 3}, r"dadt\.init\(np=\): unknown"),
        ({"algorithm": "magic"}, "--algorithm magic: unknown; choose one of pipe, sync"),
        ({"all_reduce_executor": "magic"}, "magic"),
        ({"timeout": "long"}, r"dadt\.init\(timeout='long'\): give a number"),
        ({"warmup_steps": True}, "give a whole number"),
        ({"all_reduce_buffer_size": -1}, "all-reduce-buffer-size"),
    ],
)
def test_wrong_settings(knobs, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        configured(Config(), knobs)


def test_settings_stand_above_variables(tmp_path) -> None:
    config = configured(
        Config(executor="gloo"),
        {"all_reduce_executor": "shm", "cycle_duration_ms": 3, "timeline_path": str(tmp_path / "t"), "executor": None},
    )
    assert (config.executor, config.allreduce_executor, config.cycle_duration_ms) == ("gloo", "shm", 3.0)
    assert config.timeline == str(tmp_path / "t")


def test_every_error_has_a_name_in_dadt() -> None:
    errors = {name for name, kind in vars(dadt.errors).items() if isinstance(kind, type)}
    assert errors - set(dadt.__all__) == set() and dadt.WeightsDiffer is dadt.errors.WeightsDiffer
