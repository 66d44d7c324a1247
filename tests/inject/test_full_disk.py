"""A full disk is named, also where the error hides it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from harness.disk import fill, small_disk

from dadt.inject.full_disk import noting, text_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a disk")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk"):
        yield tmp_path / "disk"


def saves(path: Path) -> None:
    noting(torch.save, "f")({"weights": torch.zeros(1 << 20)}, path)


def saves_and_removes(path: Path) -> None:
    try:
        saves(path)
    finally:
        path.unlink()


def saves_to_an_open_file(path: Path) -> None:
    with path.open("wb") as file:
        noting(torch.save, "f")({"weights": torch.zeros(1 << 20)}, f=file)


def writes(path: Path) -> None:
    with path.open("w") as file:
        file.write("x" * (4 << 20))


def copies(path: Path) -> None:
    source = path.parent.parent / "source"
    source.write_bytes(b"x" * (4 << 20))
    shutil.copyfile(source, path)


def wraps(path: Path) -> None:
    try:
        writes(path)
    except OSError as error:
        raise RuntimeError("no checkpoint") from error


def says(path: Path) -> None:
    fill(path.parent)
    raise RuntimeError(f"Caught OSError in DataLoader worker process 0.\n[Errno 28] No space left on device: '{path}'")


@pytest.mark.parametrize("act", [saves, saves_and_removes, saves_to_an_open_file, writes, copies, wraps, says])
def test_a_full_disk_is_named(disk: Path, act: Callable[[Path], None]) -> None:
    with pytest.raises((OSError, RuntimeError)) as caught:
        act(disk / "last.pt")
    assert text_of(caught.value).startswith(f"the disk of {disk} is full: ")
    assert text_of(caught.value).endswith(" of 1.0 MiB are free")


def test_other_errors_are_not_blamed_on_a_disk(disk: Path) -> None:
    for error in (RuntimeError("shapes differ"), FileNotFoundError(2, "No such file or directory", str(disk / "a"))):
        assert text_of(error) == ""
    with pytest.raises(AttributeError) as caught:
        noting(torch.save, "f")(lambda: 1, disk / "last.pt")
    assert text_of(caught.value) == ""


SAVE = """
import torch
model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.zero_grad(); model(torch.randn(2, 1024)).sum().backward(); optimizer.step()
torch.save(model.state_dict(), "disk/last.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--files", "all")])
def test_a_job_names_it_as_the_cause(launch, tmp_path: Path, options: tuple[str, ...]) -> None:
    with small_disk(tmp_path / "disk"):
        result = launch(SAVE, "-np", "2", *options, "train.py")
    assert result.code == 1
    assert f"  cause   the disk of {tmp_path / 'disk'} is full: " in result.err, result.err
    assert " of 1.0 MiB are free\n" in result.err and "\n  within  RuntimeError: " in result.err
