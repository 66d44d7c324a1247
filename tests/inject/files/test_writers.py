"""The table of docs/saving.md: what two ranks of a host do at the same paths, in whatever order their calls come."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dadt.inject.files.install import opened
from dadt.inject.files.journal import WrittenJournal
from dadt.inject.files.overlay import Overlay
from dadt.inject.files.whole import write_whole
from dadt.inject.files.writers import WriteRole, Writers

MODES = {
    "never": {},
    "read": {"knows_rank": True},
    "all": {"files": "all"},
    "read, all": {"knows_rank": True, "files": "all"},
}
LONG = 1000


class Rank:
    """What a rank's script calls, over plain folders."""

    def __init__(self, folder: Path, number: int, **known: Any) -> None:
        config = SimpleNamespace(files=known.get("files", "first"), save_once=True)
        rank = SimpleNamespace(
            first=number == 0,
            config=config,
            knows_rank=known.get("knows_rank", False),
            under_way=False,
            is_distributed=False,
            world=SimpleNamespace(rank=number),
            folder_writer=-1,
        )
        self.runtime = SimpleNamespace(ranks=rank, script=rank, replay=rank)
        self.number = number
        self.step = 0
        self.files = Overlay(
            folder / f"tree{number}",
            lambda path: True,
            Writers(self.runtime),
            WrittenJournal(folder / "written", number),
            float("inf"),
            step=lambda: self.step,
        )
        self.rmtree = self.files.rmtree(shutil.rmtree)

    def open(self, path: str, mode: str) -> Any:
        return opened(self.files, path, mode)

    def write(self, path: str, text: str, mode: str = "w") -> None:
        with self.open(path, mode) as file:
            file.write(text)

    def read(self, path: str) -> str:
        with self.open(path, "r") as file:
            return file.read()

    def save(self, path: str, text: str) -> None:
        """As torch.save where no rank waits for the other."""
        known = self.files.path(path)
        assert known is not None
        if self.files.role(known, begins=True) is WriteRole.APART:
            target = self.files.place(known)
        else:
            self.files.saved(known)
            target = known
        write_whole(target, ".dadt-", lambda beside: Path(beside).write_text(text))

    def exists(self, path: str) -> bool:
        return self.files.exists(str(self.files.path(path)))

    def content(self, epoch: int = 0) -> str:
        """Longer for the second rank, so that it shows where one is written over the other."""
        return f"{self.number}{epoch}" * LONG * (self.number + 1)


def is_whole(text: str) -> bool:
    return text in {f"{number}{epoch}" * LONG * (number + 1) for number in range(2) for epoch in range(9)}


Script = Callable[[Rank], Iterator[None]]


def save(rank: Rank) -> Iterator[None]:
    for epoch in range(3):
        rank.save("best.pt", rank.content(epoch))
        yield
        assert is_whole(rank.read("best.pt"))
        yield


def save_and_replace(rank: Rank) -> Iterator[None]:
    for epoch in range(3):
        rank.save("last.tmp", rank.content(epoch))
        yield
        rank.files.rename("last.tmp", "last.pt")
        yield
        assert is_whole(rank.read("last.pt"))
        yield


def write(rank: Rank) -> Iterator[None]:
    for epoch in range(3):
        file = rank.open("log.txt", "w")
        yield
        file.write(rank.content(epoch))
        yield
        file.close()
        yield


def write_and_replace(rank: Rank) -> Iterator[None]:
    for epoch in range(3):
        file = rank.open("last.tmp", "w")
        yield
        file.write(rank.content(epoch))
        yield
        file.close()
        yield
        rank.files.rename("last.tmp", "last.json")
        yield
        # Under --files all the other rank may have put its own there, and be about to write it.
        assert is_whole(rank.read("last.json")) or rank.runtime.ranks.config.files == "all"
        yield


def append(rank: Rank) -> Iterator[None]:
    for epoch in range(3):
        rank.write("log.csv", f"{rank.number}{epoch}\n", "a")
        yield
    assert [line for line in rank.read("log.csv").split() if line[0] == str(rank.number)] == [
        f"{rank.number}{epoch}" for epoch in range(3)
    ]


def make_folder(rank: Rank) -> Iterator[None]:
    if not rank.exists("out"):
        yield
        rank.files.mkdir("out")
    yield
    rank.write("out/name", str(rank.number))
    yield


def remove_tree(rank: Rank) -> Iterator[None]:
    if rank.exists("old"):
        yield
        rank.rmtree("old")
    yield
    rank.files.mkdir("old")
    yield
    rank.write("old/name", str(rank.number))
    yield
    assert "before" not in rank.files.listdir("old")


def keep_last_two(rank: Rank) -> Iterator[None]:
    for epoch in range(5):
        rank.save(f"epoch-{epoch}.pt", rank.content(epoch))
        yield
        mine = sorted(name for name in rank.files.listdir(".") if name.startswith("epoch-"))
        yield
        for name in [name for name in mine if int(name[6]) <= epoch - 2]:
            rank.files.remove(name)
            yield


def alone(rank: Rank) -> Iterator[None]:
    """What this rank alone writes, and one that it keeps open."""
    file = rank.open(f"rank{rank.number}.log", "w")
    yield
    file.write("begun\n")
    file.flush()
    yield
    rank.save(f"part{rank.number}.pt", rank.content())
    for _ in range(3):
        rank.step += 1
        rank.files.held.stepped()
        yield
    file.write("ended\n")
    yield
    file.close()


SCRIPTS: list[Script] = [
    save, save_and_replace, write, write_and_replace, append, make_folder, remove_tree, keep_last_two, alone,
]  # fmt: skip


def check(script: Script, mode: str, found: dict[str, str]) -> None:
    """found: the files that are there in the end."""
    firsts = mode in ("never", "read")
    names = {"save": "best.pt", "save_and_replace": "last.pt", "write": "log.txt", "write_and_replace": "last.json"}
    if script.__name__ in names:
        assert list(found) == [names[script.__name__]]
        (text,) = found.values()
        assert is_whole(text) and (not firsts or script is save or script is save_and_replace or text[0] == "0")
    elif script is append:
        assert sorted(found["log.csv"].split()) == [
            f"{number}{epoch}" for number in range(1 if mode == "never" else 2) for epoch in range(3)
        ]
    elif script in (make_folder, remove_tree):
        (text,) = found.values()
        assert text in (("0",) if firsts else ("0", "1"))
    elif script is keep_last_two:
        assert sorted(found) == ["epoch-3.pt", "epoch-4.pt"] and all(map(is_whole, found.values()))
    else:
        assert found["rank0.log"] == "begun\nended\n" and found["part0.pt"]
        assert mode == "never" or (found["rank1.log"] == "begun\nended\n" and found["part1.pt"])
        assert mode != "never" or len(found) == 2


@pytest.mark.parametrize("orders", [6, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_no_order_of_two_ranks_calls_ends_in_an_error_or_a_torn_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script, mode: str, orders: int
) -> None:
    for seed in range(orders):
        folder = tmp_path / str(seed)
        (folder / "work" / "old").mkdir(parents=True)
        (folder / "work" / "old" / "before").touch()
        if script is not remove_tree:
            shutil.rmtree(folder / "work" / "old")
        monkeypatch.chdir(folder / "work")
        rng = random.Random(seed)
        running = {number: script(Rank(folder, number, **MODES[mode])) for number in range(2)}
        bias = rng.random()  # ranks that take turns, and one that comes when the other is done
        while running:
            number = (rng.random() < bias) if len(running) == 2 else next(iter(running))
            try:
                next(running[number])
            except StopIteration:
                del running[number]
        files = [path for path in Path().rglob("*") if path.is_file()]
        check(script, mode, {path.name: path.read_text() for path in files})
        assert not list(Path().rglob(".dadt-*"))
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(folder)


@pytest.mark.parametrize("taken_away", [False, True])
def test_a_file_that_another_rank_has_written_or_renamed_meanwhile_is_told_again(
    tmp_path: Path, taken_away: bool
) -> None:
    mine, others = (WrittenJournal(tmp_path / "written", number) for number in range(2))
    mine.wrote("/last.tmp")
    others.wrote("/last.tmp")
    if taken_away:
        others.removed("/last.tmp")
    mine.wrote("/last.tmp")
    assert others.writer("/last.tmp") == mine.writer("/last.tmp") == 0
    assert not mine.is_others("/last.tmp") and not mine.is_gone("/last.tmp") and not others.is_gone("/last.tmp")
