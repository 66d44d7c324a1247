"""Who may read what a job leaves: its user, and whom the folder that the user made lets in."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.run import Result, Run

from dadt.control import private_files

SCRIPT = "import os; os.umask(u := os.umask(0)); print(oct(u)); open('own', 'w').close(); os.makedirs('folder')\n"


def modes(folder: Path) -> dict[str, int]:
    found = [folder, *folder.rglob("*")]
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in found}


def test_what_a_job_leaves_is_its_users_alone(launch: Callable[..., Result], tmp_path: Path) -> None:
    """Whatever the umask, which the script finds as it was, and which holds for what it makes itself."""
    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    try:
        done = launch(SCRIPT, "-np", "1", "--metrics", "tensorboard:a/b", "train.py")
    finally:
        os.umask(before)
    assert (done.code, done.out) == (0, b"[0] 0o22\n"), done.err
    assert {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("own", "folder", "a", "a/b")} == {
        "own": 0o644, "folder": 0o755, "a": 0o700, "a/b": 0o700,
    }  # fmt: skip
    left = modes(tmp_path / "dadt-logs")
    files = {f"{done.job}/{name}" for name in ("rank0.log", "events.jsonl", "report.json")}
    assert files <= left.keys()
    assert left == {name: 0o600 if (tmp_path / "dadt-logs" / name).is_file() else 0o700 for name in left}


def test_a_folder_that_was_there_says_who_else_may_read(start: Callable[..., Run], tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    logs.chmod(0o2750)
    run = start(SCRIPT, "-np", "1", "--log-dir", "logs", "train.py")
    assert run.finish().code == 0
    (job,) = logs.iterdir()
    left = {".": 0o2750, **{path.name: 0o640 for path in job.iterdir()}}
    assert modes(job) == {**left, "start.json": 0o600}  # what it names is run
    assert stat.S_IMODE(logs.stat().st_mode) == 0o2750


def test_where_all_users_make_files_nobody_is_let_in(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    private_files.make_inner_folder(tmp_path / "job")
    private_files.open_file(tmp_path / "job" / "log", inner=True).close()
    private_files.open_file(tmp_path / "timeline").close()
    assert modes(tmp_path) == {".": 0o1777, "job": 0o700, "job/log": 0o600, "timeline": 0o600}


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_umask_neither_adds_nor_takes_and_older_files_stay(tmp_path: Path, umask: int) -> None:
    tmp_path.chmod(0o770)
    (tmp_path / "older").touch()
    (tmp_path / "older").chmod(0o644)
    before = os.umask(umask)
    try:
        private_files.make_inner_folder(tmp_path / "job")
        private_files.open_file(tmp_path / "job" / "log", inner=True).close()
        private_files.make_folder(tmp_path / "new" / "deeper")
        private_files.open_file(tmp_path / "older", "a", inner=True).close()
    finally:
        assert os.umask(before) == umask
    wanted = {".": 0o770, "job": 0o770, "job/log": 0o660, "new": 0o700, "new/deeper": 0o700, "older": 0o644}
    assert modes(tmp_path) == wanted
