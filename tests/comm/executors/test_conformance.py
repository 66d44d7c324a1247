"""Executors x verbs x dtypes x odd shapes against NumPy, with 1 to 4 ranks."""

from pathlib import Path

import pytest
from harness.conformance import check, check_told, outputs


@pytest.mark.parametrize(("executor", "size"), [("shm", 3), ("tcp", 3), ("gloo", 2), ("hierarchical:tcp", 3)])
def test_executor_agrees_with_numpy(executor: str, size: int, tmp_path: Path) -> None:
    check(outputs(executor, size, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "size"),
    [
        *((executor, size) for executor in ("shm", "tcp", "gloo") for size in (1, 2, 3, 4)),
        ("c10d:gloo", 2),
        *((executor, size) for executor in ("hierarchical:tcp", "hierarchical:gloo") for size in (2, 3, 4)),
    ],
)
def test_executor_agrees_with_numpy_in_each_dtype_and_shape(executor: str, size: int, tmp_path: Path) -> None:
    check(outputs(executor, size, tmp_path, "product"))


@pytest.mark.parametrize(("executor", "size"), [("shm", 2), ("tcp", 3), ("gloo", 2), ("hierarchical:gloo", 4)])
def test_wrong_use_is_the_same_sentence_on_all_ranks(executor: str, size: int, tmp_path: Path) -> None:
    check_told(outputs(executor, size, tmp_path, "wrong"))
