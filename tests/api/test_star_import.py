"""What `from dadt.pytorch import *` and its like bind."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from harness import ROOT, forkserver
from harness.patience import PATIENCE

WHO = "cross_rank cross_size init initialized local_rank local_size rank shutdown size"
KERAS = (
    f"{WHO} DistributedOptimizer allgather allgather_object allreduce broadcast broadcast_object broadcast_variables"
)
PYTORCH = (
    f"{WHO} Config DistributedOptimizer all_reduce all_reduce_async barrier broad_cast broadcast_object"
    " broadcast_optimizer_state broadcast_parameters coo_all_reduce coo_all_reduce_async initialize local_barrier"
)
TENSORFLOW = ROOT / ".venv-tensorflow" / "bin" / "python"
NEEDS_TENSORFLOW = pytest.mark.skipif(not TENSORFLOW.exists(), reason="needs `make .venv-tensorflow/installed`")
CASES = [
    ("pytorch", "", PYTORCH),
    ("keras", "", f"{KERAS} add_process_set callbacks remove_process_set"),
    pytest.param(
        *("tensorflow", TENSORFLOW, f"{KERAS} DistributedGradientTape"), marks=[pytest.mark.slow, NEEDS_TENSORFLOW]
    ),
]


@pytest.mark.parametrize(("module", "python", "names"), CASES)
def test_a_star_import_binds_the_api_alone(tmp_path: Path, module: str, python: str, names: str) -> None:
    """python: empty for this one."""
    script = tmp_path / "script.py"
    script.write_text(f"exec('from dadt.{module} import *', bound := {{}})\nprint(*bound.keys() - {{'__builtins__'}})")
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow" if module == "tensorflow" else "torch"}
    done = subprocess.run(
        [python or forkserver.python(), script], capture_output=True, text=True, timeout=PATIENCE, env=environment
    )
    assert sorted(done.stdout.split()) == sorted(names.split()), done.stderr
