"""torch.save by several ranks of one host."""

from __future__ import annotations

import io
import os
import shutil
import stat
import threading
import time

import pytest
import torch
from harness.forked_ranks import Runtime, ranks

from dadt.inject.files import saving


class Control:
    """The control channel's answers about saving, over marker files that all ranks see."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.folder = runtime.folder

    def writes(self, path: str, mark: str) -> None:
        pass

    def saved(self, path: str, count: int, number: int) -> None:
        (self.folder / f"saved-{os.path.basename(path)}-{count}").touch()
        (self.folder / f"saved-{number}").touch()

    def peers(self) -> list[dict[str, object]]:
        return []

    def begin(self, step: int) -> None:
        (self.folder / f"rank{self.runtime.ranks.world.rank}-step{step}").touch()

    def await_save(self, path: str, count: int, number: int, step: int, timeout: float, far: bool = False) -> str:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if (self.folder / f"saved-{os.path.basename(path)}-{count}").exists():
                return "there"
            if (self.folder / f"saved-{number}").exists():
                return "write"
            if any((self.folder / f"rank0-step{later}").exists() for later in range(step + 1, step + 4)):
                return "write"
            time.sleep(0.01)
        return "write"


def with_control(script):
    def main(runtime: Runtime):
        runtime.ranks.control = Control(runtime)
        return script(runtime)

    return main


def test_one_rank_writes_and_all_can_read(tmp_path):
    def script(runtime: Runtime):
        path = tmp_path / "best.pt"
        read = []
        for epoch in range(5):
            torch.save({"epoch": epoch, "rank": runtime.ranks.world.rank}, path)
            shutil.copyfile(path, tmp_path / f"copy{runtime.ranks.world.rank}.pt")
            read.append(torch.load(tmp_path / f"copy{runtime.ranks.world.rank}.pt")["rank"])
            read.append(torch.load(str(path))["epoch"] >= epoch)
        return read

    assert ranks(3, with_control(script), tmp_path / "job") == [[0, True] * 5] * 3
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "copy0.pt", "copy1.pt", "copy2.pt", "job"]


def test_only_some_ranks_save(tmp_path):
    """`if rank == 0: save` waits for nobody; `if rank == 1: save` is written by rank 1 once 0 has gone on."""

    def script(runtime: Runtime):
        runtime.ranks.step = 3
        torch.save(runtime.ranks.world.rank, tmp_path / "first.pt") if runtime.ranks.world.rank == 0 else None
        torch.save(runtime.ranks.world.rank, tmp_path / "second.pt") if runtime.ranks.world.rank == 1 else None
        torch.save(runtime.ranks.world.rank, tmp_path / f"rank{runtime.ranks.world.rank}.pt")
        runtime.ranks.step = 4
        runtime.ranks.control.begin(4)

    ranks(2, with_control(script), tmp_path / "job")
    assert [torch.load(tmp_path / f"{name}.pt") for name in ("first", "second", "rank0", "rank1")] == [0, 1, 0, 1]


def test_bytes_mode_and_links_are_those_of_plain_torch(tmp_path):
    weights = {"w": torch.arange(100.0)}
    torch.save(weights, tmp_path / "model.pt")
    plain = (tmp_path / "model.pt").read_bytes(), (tmp_path / "model.pt").stat().st_mode

    def script(runtime: Runtime):
        folder = tmp_path / "out"
        if runtime.ranks.world.rank == 0:
            folder.mkdir()
            (folder / "latest.pt").symlink_to("model.pt")
            torch.save(weights, folder / "latest.pt")
            torch.save(weights, folder / "latest.pt")
            torch.save(weights, os.fspath(tmp_path / "private.pt"))

    private = tmp_path / "private.pt"
    private.touch()
    private.chmod(0o600)
    ranks(2, with_control(script), tmp_path / "job")
    written = tmp_path / "out" / "model.pt"
    assert (written.read_bytes(), written.stat().st_mode) == plain
    assert (tmp_path / "out" / "latest.pt").is_symlink()
    assert stat.S_IMODE(private.stat().st_mode) == 0o600


def test_file_objects_devices_and_missing_folders_are_each_rank_s(tmp_path):
    def script(runtime: Runtime):
        shown = []
        runtime.show_true_weights = lambda: shown.append(1)
        buffer = io.BytesIO()
        torch.save(runtime.ranks.world.rank, buffer)
        with open(tmp_path / f"open{runtime.ranks.world.rank}.pt", "wb") as file:
            torch.save(runtime.ranks.world.rank, file)
        torch.save(1, "/dev/null")
        with pytest.raises(RuntimeError, match="does not exist"):
            torch.save(1, tmp_path / "missing" / "model.pt")
        buffer.seek(0)
        return torch.load(buffer), len(shown)

    assert ranks(2, with_control(script), tmp_path / "job") == [(0, 4), (1, 4)]
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert torch.load(tmp_path / "open1.pt") == 1


@pytest.mark.parametrize("how", ["save_once", "distributed"])
def test_when_asked_every_rank_writes_whole_files(how, tmp_path):
    """Both write the same path at once; a reader never sees half a file."""

    def script(runtime: Runtime):
        runtime.script.is_distributed = how == "distributed"
        path = tmp_path / "model.pt"
        for _ in range(20):
            torch.save(torch.full((1000,), float(runtime.ranks.world.rank)), path)
            assert len(torch.load(path).unique()) == 1

    config = {"save_once": False} if how == "save_once" else {}
    ranks(2, with_control(script), tmp_path / "job", **config)


class Unpicklable:
    def __reduce__(self):
        raise ValueError("cannot be pickled")


def test_a_failed_write_leaves_nothing_and_raises(tmp_path):
    def script(runtime: Runtime):
        if runtime.ranks.world.rank == 0:
            torch.save("old", tmp_path / "model.pt")
            with pytest.raises(ValueError, match="cannot be pickled"):
                torch.save(Unpicklable(), tmp_path / "model.pt")

    ranks(2, with_control(script), tmp_path / "job")
    assert torch.load(tmp_path / "model.pt") == "old"
    assert sorted(os.listdir(tmp_path)) == ["job", "model.pt"]


def test_a_reader_never_sees_half_a_file(tmp_path):
    """The weights of a checkpoint being replaced are all old or all new."""
    path = tmp_path / "model.pt"
    torch.save(torch.zeros(200_000), path)
    stop = threading.Event()
    seen, broken = set(), []

    def read() -> None:
        while not stop.is_set():
            try:
                seen.add(tuple(torch.load(path).unique().tolist()))
            except Exception as error:
                broken.append(error)
                return

    def script(runtime: Runtime):
        for epoch in range(1, 30):
            torch.save(torch.full((200_000,), float(epoch)), path)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        ranks(2, with_control(script), tmp_path / "job")
    finally:
        stop.set()
        reader.join()
    assert not broken and all(len(values) == 1 for values in seen) and len(seen) > 1


def test_a_rank_that_saves_alone_does_not_wait_for_long(tmp_path):
    """The first local rank never comes, never goes on (it may be waiting for this rank), and never ends."""

    def script(runtime: Runtime):
        if runtime.ranks.world.rank == 0:
            while not (tmp_path / "model.pt").exists():
                time.sleep(0.01)
            return None
        torch.save("mine", tmp_path / "model.pt")
        return torch.load(tmp_path / "model.pt")

    assert ranks(2, with_control(script), tmp_path / "job") == [None, "mine"]


def test_a_rank_that_writes_slowly_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "PATIENCE_SECONDS", 0.4)

    class Slow:
        def __reduce__(self):
            time.sleep(2.0)
            return str, ("slow",)

    def script(runtime: Runtime):
        while runtime.ranks.world.rank and not list(tmp_path.glob(".dadt-*")):  # until the other one writes
            time.sleep(0.01)
        torch.save({"rank": runtime.ranks.world.rank, "slow": Slow() if runtime.ranks.world.rank == 0 else None}, path)
        return torch.load(path, weights_only=False)["rank"]

    path = tmp_path / "model.pt"
    assert ranks(2, with_control(script), tmp_path / "job") == [0, 0]
