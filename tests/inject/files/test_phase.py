"""The private copies of the ranks of an island that is not the first: they share them, as one job of torch does."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.patience import PATIENCE
from inject.files.test_overlay import Apart, Plain, call, seen, snapshot, step

from dadt.inject.files.journal import WrittenJournal
from dadt.inject.files.overlay import Overlay
from dadt.inject.files.writers import Writers
from dadt.world import World


def rank_of(tmp_path: Path, rank: int, *, distributed: bool = True) -> Any:
    """Rank `rank` of two islands of two, all on one host."""
    ranks = SimpleNamespace(
        world=World(rank=rank, local_rank=rank, world_size=4, local_size=4, island_size=2),
        first=rank == 0,
        folder_writer=-1,
        newest=SimpleNamespace(firsts=[]),
        config=SimpleNamespace(files="first", save_once=True),
    )
    script = SimpleNamespace(is_distributed=distributed, knows_rank=False)
    runtime: Any = SimpleNamespace(ranks=ranks, script=script, replay=SimpleNamespace(under_way=False))
    overlay = Overlay(
        tmp_path / f"tree{rank}",
        lambda path: True,
        Writers(runtime),
        WrittenJournal(tmp_path / "written", rank),
        float("inf"),
        island=tmp_path / f"island{rank // 2}",
    )
    return SimpleNamespace(script=script, ranks=ranks, files=overlay, replay=runtime.replay)


def put(files: Any, path: str, data: bytes, flags: int = os.O_TRUNC) -> None:
    file = files.open(path, os.O_WRONLY | os.O_CREAT | flags)
    os.write(file, data)
    os.close(file)


def got(files: Any, path: str) -> bytes:
    file = files.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1 << 20)
    finally:
        os.close(file)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_of_an_island_see_what_processes_of_one_host_would(tmp_path: Path, seed: int) -> None:
    for name in ("real", "plain"):
        (tmp_path / name / "a" / "a").mkdir(parents=True)
        (tmp_path / name / "a" / "a" / "c").write_text("old")
        (tmp_path / name / "a" / "b").write_text("older")
    before = snapshot(tmp_path / "real")
    apart = [Apart(rank_of(tmp_path, rank).files) for rank in (2, 3)]
    mine, others = random.Random(seed), random.Random(seed)
    for number in range(40):
        found = step(mine, apart[number % 2], str(tmp_path / "real"))
        assert found == step(others, Plain, str(tmp_path / "plain")), f"step {number}"
        for each in apart:
            assert seen(each, str(tmp_path / "real")) == seen(Plain, str(tmp_path / "plain")), f"step {number}"
    assert snapshot(tmp_path / "real") == before


def test_what_a_rank_wrote_before_it_had_a_process_group_is_its_islands_afterwards(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    path = str(tmp_path / "real")
    both = [rank_of(tmp_path, rank, distributed=False) for rank in (2, 3)]
    two, three = (Apart(rank.files) for rank in both)
    for each, text in ((two, b"two"), (three, b"three")):
        each.mkdir(f"{path}/run")  # a script that believes it is alone may do so on each rank
        put(each, f"{path}/run/settings", text)
        each.symlink("run", f"{path}/latest")
    put(three, f"{path}/run/more", b"three")
    log = three.open(f"{path}/run/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(log, b"1")
    assert got(two, f"{path}/run/settings") == b"two" and got(three, f"{path}/run/settings") == b"three"
    for rank in both:
        rank.script.is_distributed = True
    assert got(two, f"{path}/run/settings") == got(three, f"{path}/latest/settings") == b"two"
    assert got(two, f"{path}/run/settings") == b"two"
    os.write(log, b"2")
    for each in (two, three):
        assert got(each, f"{path}/run/more") == b"three" and got(each, f"{path}/run/log") == b"12"
    three.remove(f"{path}/run/settings")
    assert call(two.stat, f"{path}/run/settings") is FileNotFoundError
    assert not os.listdir(path)
    first = [both[0].files.missed(), both[1].files.missed()]
    assert first == [[f"{path}/run/log", f"{path}/run/more"], []]  # told once


def test_the_first_island_and_others_do_not_see_it(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    path = str(tmp_path / "real" / "saved")
    files = {rank: rank_of(tmp_path, rank).files for rank in range(4)}
    for each in files.values():
        call(each.mkdir, path)
    for rank, each in files.items():
        put(each, f"{path}/part{rank % 2}", str(rank).encode())
        if rank % 2 == 0:
            put(each, f"{path}/.tmp", str(rank).encode())
            each.rename(f"{path}/.tmp", f"{path}/.metadata")
    for rank, each in files.items():
        first = rank - rank % 2
        assert got(each, f"{path}/.metadata") == str(first).encode()
        assert [got(each, f"{path}/part{n}") for n in range(2)] == [str(first + n).encode() for n in range(2)]


def test_a_file_that_was_begun_before_does_not_replace_that_of_the_first_rank(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    path = str(tmp_path / "real" / "log")
    zero, two = (rank_of(tmp_path, rank, distributed=False) for rank in (0, 2))
    two.script.knows_rank = True
    file = two.files.open_held(path, "w")
    file.write(b"two")
    put(zero.files, path, b"zero")
    two.script.is_distributed = True
    two.files.exists(str(two.files.path(path)))
    file.close()
    assert Path(path).read_bytes() == b"zero" and got(two.files, path) == b"two"


def test_an_island_that_takes_over_writes_on_in_the_folders_that_it_made(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    path = str(tmp_path / "real")
    both = [rank_of(tmp_path, rank) for rank in (2, 3)]
    for rank in both:
        put(rank.files, f"{path}/part{rank.ranks.world.rank % 2}", b"old")
    both[0].files.mkdir(f"{path}/of two")
    for rank in both:
        rank.ranks.newest.firsts = [2]
    both[0].ranks.first = True
    both[0].files.writers.take_over()
    put(both[1].files, f"{path}/part1", b"3")  # before the first rank has come so far
    both[0].files.take_over()
    put(both[0].files, f"{path}/of two/part0", b"2")
    assert sorted(os.listdir(path)) == ["of two", "part1"] and Path(path, "part1").read_bytes() == b"3"
    assert got(both[1].files, f"{path}/of two/part0") == b"2"


def test_a_replay_has_its_copies_for_itself(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    path = str(tmp_path / "real")
    two, three = (rank_of(tmp_path, rank) for rank in (2, 3))
    two.replay.under_way = True
    put(two.files, f"{path}/log", b"again")
    two.files.mkdir(f"{path}/run")
    put(three.files, f"{path}/log", b"new")
    two.replay.under_way = False
    two.files.replayed()
    assert got(two.files, f"{path}/log") == b"new" and two.files.listdir(path) == ["log", "run"]
    assert not os.listdir(path)


def test_ranks_that_change_one_folder_at_once_lose_nothing(tmp_path: Path) -> None:
    (tmp_path / "real" / "old").mkdir(parents=True)
    (tmp_path / "real" / "log").write_bytes(b"old\n")
    path, barrier = str(tmp_path / "real"), threading.Barrier(2)
    failed: list[BaseException] = []

    def work(rank: int) -> None:
        files = rank_of(tmp_path, rank).files
        try:
            for number in range(40):
                barrier.wait(PATIENCE)
                put(files, f"{path}/log", b"%d\n" % rank, os.O_APPEND)
                call(files.mkdir, f"{path}/{number}")
                put(files, f"{path}/{number}/part{rank}", b"%d" % number)
                barrier.wait(PATIENCE)
                assert sorted(files.listdir(f"{path}/{number}")) == ["part2", "part3"]
                assert {each.name for each in files.scandir(path)} >= {"log", str(number)}
                barrier.wait(PATIENCE)
                if number % 2:
                    call(files.remove, f"{path}/{number}/part2")
                else:
                    put(files, f"{path}/beside{rank}", b"%d" % number)
                    files.rename(f"{path}/beside{rank}", f"{path}/{number}/part2")
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    both = [threading.Thread(target=work, args=(rank,)) for rank in (2, 3)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    assert not failed, failed
    log = got(rank_of(tmp_path, 2).files, f"{path}/log").splitlines()
    assert log[0] == b"old" and sorted(log[1:]) == [b"2"] * 40 + [b"3"] * 40
    assert os.listdir(path + "/old") == [] and Path(path, "log").read_bytes() == b"old\n"
