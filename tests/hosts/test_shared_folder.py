"""Hosts that see the same working folder: the first rank of the first of them writes there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness.machine import Network

SCRIPT = """
import glob, json, os, shutil, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
me = int(os.environ["DADT_RA" + "NK"]) if {reads} else int(open("/proc/self/environ").read().split("DADT_RANK=")[1][0])
if os.path.isdir("out"):
    shutil.rmtree("out")
os.makedirs("out", exist_ok=True)
for epoch in range(3):
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()
    torch.save([me, epoch], "out/last.tmp")
    os.replace("out/last.tmp", "out/last.pt")
    assert torch.load("out/last.pt")[1] == epoch
    with open("out/state.json", "w") as file:
        json.dump([me] * 1000, file)
    torch.save([me, epoch], f"out/epoch-{{epoch}}.pt")
    for old in sorted(glob.glob("out/*"), key=os.path.getmtime):
        assert ".dadt-" not in old
    for old in sorted(glob.glob("out/epoch-*.pt"))[:-1]:
        os.remove(old)
    with open("out/log.csv", "a") as file:
        print(me, epoch, file=file)
open(f"out/rank{{me}}", "w").close()
"""


def lay_over(network: Network, hosts: list[int], folder: Path, here: Path) -> None:
    """These hosts see another folder at the path of the job's."""
    folder.mkdir()
    for number in hosts:
        network[number].run("mount", "--bind", folder, here)


@pytest.mark.parametrize(
    ("groups", "reads"),
    [
        pytest.param([[0, 1, 2]], False, id="one"),
        pytest.param([[0, 1, 2]], True, id="one, RANK read", marks=pytest.mark.slow),
        pytest.param([[0, 1], [2, 3]], False, id="two", marks=pytest.mark.slow),
        pytest.param([[0, 2], [1]], True, id="lacking", marks=pytest.mark.slow),
    ],
)
def test_the_first_rank_of_the_first_host_that_sees_a_folder_writes_there(
    hosts: Callable[[int], Network],
    start: Callable,
    tmp_path: Path,
    tmp_path_factory,
    groups: list[list[int]],
    reads: bool,
) -> None:
    count = sum(map(len, groups))
    network = hosts(count)
    folders = [tmp_path]
    text = SCRIPT.format(reads=reads)
    for group in groups[1:]:
        folders.append(tmp_path_factory.mktemp("other") / "mount")
        lay_over(network, group, folders[-1], tmp_path)
        (folders[-1] / "train.py").write_text(text)
    run = start(network, text, "-np", count, "-H", network.list(1), "train.py")
    result = run.finish(240.0)
    assert result.code == 0, result.err
    for group, folder in zip(groups, folders, strict=True):
        out = folder / "out"
        first = min(group)
        ranks = group if reads else [first]
        expected = ["epoch-2.pt", "last.pt", "log.csv", "state.json", *(f"rank{rank}" for rank in ranks)]
        assert sorted(path.name for path in out.iterdir()) == sorted(expected)
        assert (out / "state.json").read_text() == str([first] * 1000)
        lines = sorted((out / "log.csv").read_text().splitlines())
        assert lines == sorted(f"{rank} {epoch}" for rank in ranks for epoch in range(3))
        assert not list(folder.rglob(".dadt-*"))
