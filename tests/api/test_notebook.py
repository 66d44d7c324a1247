"""`dadt.run` in a real notebook: its functions travel, its cells show what workers print, its kernel survives."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat
import pytest
from harness import forkserver
from harness.patience import PATIENCE

CELLS = [
    """
import os
import dadt

class Point:
    def __init__(self, x): self.x = x

def work(factor):
    rank = int(os.environ["RANK"])
    print("hello from", rank)
    if factor < 0: raise LookupError("no such factor")
    return Point(rank * factor)
""",
    "here = os.getpid()\nprint([point.x for point in dadt.run(work, (10,), np=2)])",
    "try: dadt.run(work, (-1,), np=2)\nexcept LookupError as error: print('caught', error)",
    "print(os.getpid() == here, [point.x for point in dadt.run(work, (3,), np=2)])",
]


def printed(cell: nbformat.NotebookNode) -> list[str]:
    return "".join(out["text"] for out in cell["outputs"] if out.get("name") == "stdout").splitlines()


def test_a_function_of_a_notebook_runs_on_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DADT_PYTHON", forkserver.python())  # forks the agents
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=PATIENCE, resources={"metadata": {"path": str(tmp_path)}}).execute()
    _, first, caught, last = notebook["cells"]
    assert printed(first)[-1] == "[0, 10]"
    assert sorted(printed(first)[:-1]) == ["[0] hello from 0", "[1] hello from 1"]
    assert printed(caught)[-1] == "caught no such factor"
    assert printed(last)[-1] == "True [0, 3]"
