"""Every executor x verb x dtype x odd shape against NumPy, with 1 to 4 ranks."""

import re
import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from core.ranks import printed
from suite import main

RANKS = str(Path(__file__).with_name("suite.py"))


def check(outputs: list[str]) -> None:
    """Each rank went through all cases, none was wrong, and all have the same bits."""
    wrong = [line for text in outputs for line in text.splitlines() if line.startswith("WRONG")]
    assert not wrong, "\n".join(wrong[:20])
    done = [line for text in outputs for line in text.splitlines() if line.startswith("DONE")]
    assert len(done) == len(outputs), "\n".join(text[-2000:] for text in outputs)
    cases, digests = zip(*(line.split()[1:] for line in done), strict=True)
    assert len(set(digests)) == 1, done
    assert min(map(int, cases)) > 3000


def outputs(executor: str, size: int, folder: Path, *more: str) -> list[str]:
    """What the ranks have printed."""
    ranks = ((executor, rank, size, str(folder), *more) for rank in range(size))
    return [rank.said for rank in printed(folder, main, *ranks)]


@pytest.mark.parametrize(
    ("executor", "size"),
    [
        *(("shm", size) for size in (1, 2, 3, 4)),
        ("gloo", 2),
        *(pytest.param("gloo", size, marks=pytest.mark.slow) for size in (1, 3, 4)),
        ("c10d:gloo", 2),
        ("hierarchical:gloo", 2),
        *(pytest.param("hierarchical:gloo", size, marks=pytest.mark.slow) for size in (3, 4)),
    ],
)
def test_executor_agrees_with_numpy(executor: str, size: int, tmp_path: Path) -> None:
    check(outputs(executor, size, tmp_path))


@pytest.mark.parametrize(("executor", "size"), [("shm", 2), ("gloo", 2), ("hierarchical:gloo", 4)])
def test_wrong_use_is_the_same_sentence_on_all_ranks(executor: str, size: int, tmp_path: Path) -> None:
    check_told(outputs(executor, size, tmp_path, "wrong"))


def check_told(said: list[str]) -> None:
    """All ranks say the same of each case, and what two of them are in."""
    told = [[line for line in text.splitlines() if not line.startswith(("[", "dadt: "))] for text in said]
    assert all(each == told[0] for each in told), said
    lines = dict(line.split(": ", 1) for line in told[0])
    assert list(lines) == ["lengths", "long lengths", "dtypes", "shapes", "reductions", "verbs", "roots", "pieces"]
    for case, text in lines.items():
        assert re.search(r"rank 0 .*rank 1 ", text) or case == "pieces", text
    assert "rank 1 sends 16 bytes to rank 0, which expects 20" in lines["pieces"]
