"""A job ends with the same bits, whenever snapshots are taken of it, and from whichever of them it goes on."""

from __future__ import annotations

import pytest
import torch
from harness import forkserver
from harness.replayed import HEAD, SCRIPTS

from dadt.inject.replay.copies import LARGE, Copies, CopyMemory

KEEPS_ALL = "from dadt.control import snapshots\nsnapshots.KEPT = 10**6\n"
OPTIONS = ["-np", "2", "--warmup-steps", "5"]
BEGINS = ["--seed", "7"]


def several(*names: str) -> str:
    """One job that trains all of these, one after the other."""
    parts = [f"exec(compile({SCRIPTS[name]!r}, {name!r}, 'exec'), dict(globals()))\n" for name in names]
    return HEAD + KEEPS_ALL + "".join(parts)


def told(result) -> list[str]:
    """What each model of each rank has come to."""
    assert result.code == 0, result.err
    return sorted(line for line in result.out.decode().splitlines() if "ends with" in line)


KINDS = [
    (["--algorithm", "pipe"], ("tutorial", "gan", "scaler", "warm-restarts-and-accumulation")),
    (["--algorithm", "pipe", "--compression", "int8"], ("tutorial", "gan")),
    (["--algorithm", "pipe", "--compression", "powersgd:1"], ("ema", "ahead")),
    (["--algorithm", "sync", "--compression", "int8"], ("tutorial", "metrics")),
    (["--algorithm", "sync", "--compression", "powersgd:1"], ("one-cycle", "gan")),
    (["--algorithm", "pipe", "--predict", "1.5"], ("tutorial", "vae")),
]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("options", "names"), KINDS)
def test_snapshots_change_nothing(launch, tmp_path, options: list[str], names: tuple[str, ...]) -> None:
    begins = [*OPTIONS, *options, *BEGINS]
    program = (forkserver.python(), "train.py")
    expected = told(launch(several(*names), *begins, *program))
    for every in ("0.05s", "3steps", "1steps"):
        taken = launch(several(*names), *begins, "--snapshot-every", every, *program)
        assert told(taken) == expected, every
    root = tmp_path / "dadt-logs" / taken.job / "snapshots"
    there = [folder for folder in sorted(root.glob("[0-9]*")) if len(list(folder.glob("*.json"))) == 2]
    for place in (0.15, 0.5, 0.9):  # in the warm-up, and late
        found = there[int(place * len(there))]
        resumed = launch(several(*names), *OPTIONS, *options, "--resume", str(found), *program)
        ends = told(resumed)  # those that the replay has passed are not said once more
        assert ends == [line for line in expected if line in ends] and len(ends) >= 2, found


def test_copies_of_another_thread_are_as_it_was_or_of_no_use() -> None:
    room = CopyMemory()
    large, small = torch.arange(LARGE // 4, dtype=torch.float32), torch.ones(3)
    copies = Copies(room)
    content = copies.later({"large": large, "small": [small, small], "none": None})
    at_once = copies.now(large.t() * 2)
    copies.begin()
    assert copies.finish()
    small.add_(1)
    assert torch.equal(content["large"], large) and content["large"].data_ptr() != large.data_ptr()
    assert content["small"][0] is content["small"][1] and content["small"][0].tolist() == [1, 1, 1]
    copies.over()
    again = Copies(room)
    assert again.now(large.t() * 2).data_ptr() == at_once.data_ptr()  # memory is kept from one to the next
    again.later(large)
    again.begin()
    large.add_(1)
    assert not again.finish()
