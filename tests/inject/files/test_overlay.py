"""The view of a rank whose files are kept apart, beside plain folders."""

from __future__ import annotations

import os
import random
import shutil
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dadt.errors import CommTimeout
from dadt.inject.files.journal import WrittenJournal
from dadt.inject.files.overlay import Overlay
from dadt.inject.files.writers import Writers

NAMES = ["a", "b", "a/a", "a/b", "b/a", "b/c", "a/a/c"]
FLAGS = {
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "r+": os.O_RDWR,
    "r": os.O_RDONLY,
}


class Plain:
    """The functions of `os`."""

    open, mkdir, rmdir, remove, rename = os.open, os.mkdir, os.rmdir, os.remove, os.rename
    listdir, link, symlink = os.listdir, os.link, os.symlink

    @staticmethod
    def rmtree(path: str) -> None:
        shutil.rmtree(path)

    stat = os.stat


class Apart:
    """The same of an overlay."""

    def __init__(self, overlay: Overlay) -> None:
        for name in ("open", "mkdir", "rmdir", "remove", "rename", "listdir", "link", "symlink"):
            setattr(self, name, getattr(overlay, name))
        self.rmtree = overlay.rmtree(shutil.rmtree)
        self.stat = overlay.looking(os.stat)


def rank_of(first: bool = False, files: str = "first", *, knows_rank: bool = False, replaying: bool = False) -> Any:
    """A rank, as the decision about files needs it."""
    config = SimpleNamespace(files=files, save_once=True)
    rank = SimpleNamespace(
        first=first,
        config=config,
        knows_rank=knows_rank,
        under_way=replaying,
        is_distributed=False,
        world=SimpleNamespace(rank=0 if first else 1),
        folder_writer=-1,
    )
    return SimpleNamespace(ranks=rank, script=rank, replay=rank)


def overlay_of(tmp_path: Path, runtime: Any = None, rank: int = 1, start: float = float("inf")) -> Overlay:
    journal = WrittenJournal(tmp_path / "written", rank)
    return Overlay(tmp_path / f"tree{rank}", lambda path: True, Writers(runtime or rank_of()), journal, start)


def snapshot(folder: Path) -> dict[str, Any]:
    """What lies there, with contents, inodes and times."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
        found[str(path.relative_to(folder))] = (content, status.st_ino, status.st_mtime_ns)
    return found


def seen(os_like: Any, folder: str) -> dict[str, Any]:
    """What the functions show below a folder."""
    found: dict[str, Any] = {}
    for name in sorted(os_like.listdir(folder)):
        path = os.path.join(folder, name)
        if stat.S_ISDIR(os_like.stat(path).st_mode):
            found[name] = seen(os_like, path)
        else:
            file = os_like.open(path, os.O_RDONLY)
            found[name] = os.read(file, 1 << 16)
            os.close(file)
    return found


def call(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except OSError as error:
        return type(error)


def write(os_like: Any, path: str, mode: str, data: bytes) -> Any:
    file = os_like.open(path, FLAGS[mode])
    try:
        return os.write(file, data) if mode != "r" else os.read(file, 100)
    finally:
        os.close(file)


def step(rng: random.Random, os_like: Any, root: str) -> Any:
    """One call, the same for the same random numbers."""
    path, other = (os.path.join(root, rng.choice(NAMES)) for _ in range(2))
    data = str(rng.randrange(1000)).encode()
    mode = rng.choice(list(FLAGS))
    kind = rng.choice(["write"] * 6 + ["mkdir", "mkdir", "rmdir", "remove", "rmtree", "rename", "rename"])
    is_there = call(os_like.stat, path) not in (FileNotFoundError, NotADirectoryError)
    if kind == "write":
        return call(write, os_like, path, mode, data)
    if kind == "rename":
        nested = other.startswith(path) or path.startswith(other)
        return None if nested or not is_there else call(os_like.rename, path, other)
    if not is_there or (kind == "rmtree" and not stat.S_ISDIR(os_like.stat(path).st_mode)):
        return None if kind != "mkdir" else call(os_like.mkdir, path)
    return call(getattr(os_like, kind), path)


@pytest.mark.parametrize("seed", range(40))
def test_a_rank_sees_what_it_would_alone_and_others_see_nothing_of_it(tmp_path: Path, seed: int) -> None:
    for name in ("real", "plain"):
        (tmp_path / name / "a" / "a").mkdir(parents=True)
        (tmp_path / name / "a" / "a" / "c").write_text("old")
        (tmp_path / name / "a" / "b").write_text("older")
    before = snapshot(tmp_path / "real")
    apart = Apart(overlay_of(tmp_path))
    mine, others = random.Random(seed), random.Random(seed)
    for number in range(40):
        found = step(mine, apart, str(tmp_path / "real"))
        expected = step(others, Plain, str(tmp_path / "plain"))
        assert found == expected, f"step {number}"
        assert seen(apart, str(tmp_path / "real")) == seen(Plain, str(tmp_path / "plain")), f"step {number}"
    assert snapshot(tmp_path / "real") == before


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "real").mkdir()
    return tmp_path / "real"


@pytest.fixture
def late(tmp_path: Path, folder: Path) -> Apart:
    """For it, all that lies in `folder` is the first local rank's work."""
    return Apart(overlay_of(tmp_path, start=0.0))


def test_what_the_first_rank_has_just_done_is_in_nobody_s_way(folder: Path, late: Any) -> None:
    (folder / "run").mkdir()
    (folder / "log.csv").write_text("step 1\n")
    late.mkdir(str(folder / "run"))
    with pytest.raises(FileExistsError):
        late.mkdir(str(folder / "run"))  # twice is the script's own mistake
    write(late, str(folder / "log.csv"), "a", b"step 1\n")
    write(late, str(folder / "run/args"), "x", b"mine")
    (folder / "run" / "other").write_text("first")
    late.symlink("args", str(folder / "run/latest"))
    late.remove(str(folder / "gone"))
    late.rename(str(folder / "new.pt"), str(folder / "log.csv"))  # renamed already
    late.rmtree(str(folder / "neither"))
    late.rename(str(folder / "no"), str(folder / "where"))  # renamed and removed, or the first rank's mistake
    assert seen(late, str(folder)) == {
        "log.csv": b"step 1\n",
        "run": {"args": b"mine", "latest": b"mine", "other": b"first"},
    }
    assert sorted(os.listdir(folder / "run")) == ["other"]


def test_a_folder_that_the_first_rank_made_keeps_what_this_one_writes_there(tmp_path: Path, folder: Path) -> None:
    """As where `os.makedirs(folder, exist_ok=True)` comes before each save."""
    first, second = (overlay_of(tmp_path, rank_of(first=rank == 0), rank) for rank in range(2))
    path = str(folder / "run")
    first.mkdir(path)
    second.mkdir(path)
    write(second, f"{path}/log.csv", "a", b"mine")
    for rank in (first, second):
        with pytest.raises(FileExistsError):
            rank.mkdir(path)
    assert seen(Apart(second), path) == {"log.csv": b"mine"}


def test_a_link_to_the_file_of_another_rank_is_separated_before_it_is_written(tmp_path: Path, folder: Path) -> None:
    for name in ("kept", "anew", "linked"):
        (folder / name).write_text("first")
    apart: Any = Apart(overlay_of(tmp_path))
    for name in ("kept", "anew"):
        apart.rename(str(folder / name), str(folder / f"{name}2"))
    apart.link(str(folder / "linked"), str(folder / "linked2"))
    write(apart, str(folder / "kept2"), "a", b" mine")
    write(apart, str(folder / "anew2"), "w", b"mine")
    write(apart, str(folder / "linked2"), "r+", b"mine!")
    expected = {"kept2": b"first mine", "anew2": b"mine", "linked": b"first", "linked2": b"mine!"}
    assert seen(apart, str(folder)) == expected
    assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(
        ("kept", "anew", "linked"), "first"
    )


def test_a_folder_is_shown_as_scandir_shows_it(tmp_path: Path, folder: Path) -> None:
    (folder / "old").write_text("old")
    overlay = overlay_of(tmp_path)
    write(overlay, str(folder / "new"), "w", b"new")
    overlay.mkdir(str(folder / "inner"))
    with overlay.scandir(folder) as listing:
        entries = {entry.name: entry for entry in listing}
    assert sorted(entries) == ["inner", "new", "old"]
    assert entries["new"].path == str(folder / "new") == os.fspath(entries["new"])
    assert entries["inner"].is_dir() and entries["new"].is_file() and not entries["old"].is_symlink()
    assert entries["new"].stat().st_size == 3


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("lists", ["listdir", "scandir"])
def test_a_listed_file_may_be_removed_by_the_first_rank(tmp_path: Path, folder: Path, lists: str, copies: bool) -> None:
    """As where a script removes the oldest of its checkpoints. copies: this rank has written in the folder, too."""
    first, second = (overlay_of(tmp_path, rank_of(first=rank == 0), rank) for rank in range(2))
    stat_, lstat = second.looking(os.stat), second.looking(os.lstat)
    old, path = folder / "old", str(folder / "0.pt")
    old.write_text("")
    write(first, path, "w", b"saved")
    if copies:
        write(second, str(folder / "log"), "w", b"")
    expected = os.stat(path)
    listed = list(getattr(second, lists)(str(folder)))
    assert len(listed) == 2 + copies
    first.remove(path)
    old.unlink()
    assert stat_(path) == lstat(path) == expected
    for entry in listed if lists == "scandir" else ():
        assert entry.stat().st_size == (5 if entry.name == "0.pt" else 0)
    with pytest.raises(FileNotFoundError):
        stat_(str(old))  # removed by no rank
    assert sorted(second.listdir(str(folder))) == ["log"] * copies
    with pytest.raises(FileNotFoundError):
        stat_(path)  # no longer listed


def test_what_a_rank_has_removed_itself_is_gone_for_it(tmp_path: Path, folder: Path) -> None:
    first, second = (overlay_of(tmp_path, rank_of(first=rank == 0), rank) for rank in range(2))
    path = str(folder / "0.pt")
    write(first, path, "w", b"saved")
    assert second.listdir(str(folder)) == ["0.pt"]
    second.remove(path)
    first.remove(path)
    with pytest.raises(FileNotFoundError):
        second.looking(os.stat)(path)
    assert second.listdir(str(folder)) == []


def test_attributes_are_those_of_the_copy(tmp_path: Path, folder: Path) -> None:
    (folder / "first").write_text("")
    overlay = overlay_of(tmp_path)
    write(overlay, str(folder / "mine"), "w", b"")
    chmod = overlay.changing(os.chmod)
    before = (folder / "first").stat().st_mode
    chmod(str(folder / "first"), 0o600)  # the first local rank does it
    chmod(str(folder / "mine"), 0o600)
    assert (folder / "first").stat().st_mode == before
    assert stat.S_IMODE(overlay.looking(os.stat)(str(folder / "mine")).st_mode) == 0o600
    with pytest.raises(FileNotFoundError):
        chmod(str(folder / "none"), 0o600)


def test_a_script_that_finds_that_it_is_a_rank_goes_on_in_the_folders_that_it_made(
    tmp_path: Path, folder: Path
) -> None:
    runtime = rank_of()
    overlay = overlay_of(tmp_path, runtime)
    overlay.mkdir(str(folder / "out"))
    write(overlay, str(folder / "out/log"), "w", b"mine")
    runtime.script.knows_rank = True
    write(overlay, str(folder / "out/rank1"), "w", b"mine, too")
    assert (folder / "out" / "rank1").read_text() == "mine, too"
    assert write(overlay, str(folder / "out/log"), "r", b"") == b"mine"
    assert os.listdir(folder / "out") == ["rank1"]


def test_paths_may_be_of_bytes_or_of_objects(tmp_path: Path, folder: Path) -> None:
    overlay = overlay_of(tmp_path)
    write(overlay, os.fsencode(folder / "new"), "w", b"new")  # as TensorBoard does
    assert write(overlay, folder / "new", "r", b"") == b"new"
    assert overlay.listdir(os.fsencode(folder)) == [b"new"]
    (entry,) = overlay.scandir(os.fsencode(folder))
    assert (entry.name, entry.path) == (b"new", os.fsencode(folder / "new"))
    with pytest.raises(FileNotFoundError) as error:
        write(overlay, folder / "none", "r", b"")
    assert error.value.filename == folder / "none"
    with pytest.raises(TypeError):
        overlay.listdir(1.5)


def test_the_first_rank_may_begin_a_file_while_another_is_about_to_append(tmp_path: Path, folder: Path) -> None:
    first = WrittenJournal(tmp_path / "written", 0)

    class Late(WrittenJournal):
        def before(self, path: str) -> int | None:
            known = super().before(path)
            first.wrote(path)  # just after this one has looked
            return known

    overlay = Overlay(tmp_path / "tree1", lambda path: True, Writers(rank_of()), Late(tmp_path / "written", 1), 0.0)
    file = overlay.open(str(folder / "new.csv"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, b"line")
    os.close(file)
    assert Path(overlay.where(str(folder / "new.csv"))).read_text() == "line"
    assert not (folder / "new.csv").exists()


def test_a_rank_that_waits_for_its_turn_says_so_and_in_the_end_for_whom(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("dadt.inject.files.journal.PATIENCE_SECONDS", 0.05)
    told: list[tuple[str, float]] = []
    first = WrittenJournal(tmp_path / "written", 0)
    second = WrittenJournal(tmp_path / "written", 1, timeout=0.3, tell=lambda what, waited: told.append((what, waited)))
    says = rf"rank 1 waited 0 s .* as process {os.getpid()}, another"
    with first.turn(), pytest.raises(CommTimeout, match=says), second.turn():
        pass
    assert {what for what, _ in told} == {"changing a file"} and told == sorted(told)
    with second.turn():
        pass


def test_what_is_appended_goes_on_where_the_first_rank_had_begun(tmp_path: Path, folder: Path) -> None:
    first, second = (overlay_of(tmp_path, rank_of(first=rank == 0), rank) for rank in range(2))
    path = str(folder / "log.csv")
    Path(path).write_text("epoch,loss\n")
    for epoch in range(2):
        write(first, path, "a", f"{epoch},first\n".encode())
    for epoch in range(2):
        write(second, path, "a", f"{epoch},second\n".encode())
    assert write(second, path, "r", b"") == b"epoch,loss\n0,second\n1,second\n"
    assert Path(path).read_text() == "epoch,loss\n0,first\n1,first\n"


def test_a_rank_sees_one_file_of_those_that_are_named_by_a_time(tmp_path: Path, folder: Path) -> None:
    """As TensorBoard's reader, which reads all files of events that it finds."""
    first, second = (overlay_of(tmp_path, rank_of(first=rank == 0), rank) for rank in range(2))
    (folder / "events.out.tfevents.170.host.1.0").write_text("of the last job")
    write(first, str(folder / "events.out.tfevents.177.host.12.0"), "w", b"first")
    assert len(second.listdir(str(folder))) == 2
    write(second, str(folder / "events.out.tfevents.178.host.13.0"), "w", b"second")
    names = ["events.out.tfevents.170.host.1.0", "events.out.tfevents.178.host.13.0"]
    assert sorted(second.listdir(str(folder))) == names
    (folder / ".dadt-half").mkdir()
    assert sorted(second.listdir(str(folder))) == names and ".dadt-half" not in first.listdir(str(folder))
    assert [entry.name for entry in first.scandir(str(folder))] and not second.missed()


def test_a_library_that_opens_files_by_itself_finds_the_copies(tmp_path: Path, folder: Path) -> None:
    second = overlay_of(tmp_path)
    path = str(folder / "weights.h5")
    private = second.path_for_library(path, "w")
    assert private != path
    Path(private).write_text("mine")
    assert second.path_for_library(path, "r") == second.path_for_library(path, "a") == private
    assert second.path_for_library(str(folder / "other.h5"), "r") == str(folder / "other.h5")
    assert second.missed() == [path]


def test_what_the_first_rank_has_renamed_already_is_this_ranks_own(tmp_path: Path) -> None:
    """As where each rank keeps the newest two checkpoints, and the first one is ahead."""
    first, second = overlay_of(tmp_path, rank_of(first=True), rank=0), overlay_of(tmp_path)
    names = [str(tmp_path / f"last-{number}.pt") for number in range(3)]
    half = str(tmp_path / "half")
    write(first, half, "w", b"")
    write(second, half, "w", b"")
    second.rename(half, names[0])
    for name in names:
        write(first, half, "w", b"")
        first.rename(half, name)
    first.remove(names[0])

    def listed() -> list[str]:
        return [name for name in second.listdir(str(tmp_path)) if name.startswith("last")]

    assert listed() == ["last-0.pt"]
    for name in names[1:]:
        second.rename(half, name)
    assert sorted(listed()) == ["last-0.pt", "last-1.pt", "last-2.pt"]


def test_files_can_be_written_while_a_cleaner_takes_the_private_copies_away(tmp_path: Path) -> None:
    """At any moment: what is being written is lost, and the next file is written again."""
    overlay, taken, done = overlay_of(tmp_path), tmp_path / "taken", threading.Event()
    folder = tmp_path / "real" / "a" / "b"
    folder.mkdir(parents=True)

    def clean() -> None:
        number = 0
        while not done.wait(0.001):
            number += 1
            with suppress(FileNotFoundError):
                os.rename(overlay.tree, f"{taken}{number}")

    cleaner = threading.Thread(target=clean)
    cleaner.start()
    try:
        for step in range(3000):
            os.close(overlay.open(folder / f"file{step % 3}", FLAGS["w"]))
    finally:
        done.set()
        cleaner.join()
    assert len(list(tmp_path.glob("taken*"))) > 10
    shutil.rmtree(overlay.tree, ignore_errors=True)
    overlay.take_over()
    os.close(overlay.open(folder / "file0", FLAGS["w"]))
    assert overlay.is_private(str(folder / "file0"))
    assert stat.S_IMODE(os.stat(overlay.tree).st_mode) == 0o700
