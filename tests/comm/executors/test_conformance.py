"""Every executor x verb x dtype x odd shape against NumPy, with 1 to 4 ranks."""

from pathlib import Path

import pytest
from harness.conformance import check, check_told, outputs


@pytest.mark.parametrize(
    ("executor", "size"),
    [
        ("shm", 2),
        ("shm", 3),
        *(pytest.param("shm", size, marks=pytest.mark.slow) for size in (1, 4)),
        ("tcp", 3),
        *(pytest.param("tcp", size, marks=pytest.mark.slow) for size in (1, 2, 4)),
        ("gloo", 2),
        *(pytest.param("gloo", size, marks=pytest.mark.slow) for size in (1, 3, 4)),
        ("c10d:gloo", 2),
        ("hierarchical:tcp", 3),
        pytest.param("hierarchical:tcp", 4, marks=pytest.mark.slow),
        ("hierarchical:gloo", 2),
        *(pytest.param("hierarchical:gloo", size, marks=pytest.mark.slow) for size in (3, 4)),
    ],
)
def test_executor_agrees_with_numpy(executor: str, size: int, tmp_path: Path) -> None:
    check(outputs(executor, size, tmp_path))


@pytest.mark.parametrize(("executor", "size"), [("shm", 2), ("tcp", 3), ("gloo", 2), ("hierarchical:gloo", 4)])
def test_wrong_use_is_the_same_sentence_on_all_ranks(executor: str, size: int, tmp_path: Path) -> None:
    check_told(outputs(executor, size, tmp_path, "wrong"))
