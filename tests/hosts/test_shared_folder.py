"""Hosts that see the same working folder: the first rank of the first of them writes there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import lightened
from harness.machine import Network
from harness.patience import PATIENCE

SCRIPT = """
import glob, json, os, shutil, torch{dadt}
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
name = "RA" + "NK"
me = int(os.environ[name]) if {reads} else int(open("/proc/self/environ").read().split(f"\\0{{name}}=")[1][0])
if {removes} and os.path.isdir("out"):
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


@pytest.mark.timeout(300)
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
    text = SCRIPT.format(reads=reads, dadt="", removes=True)
    folders = mounted(network, groups, tmp_path, tmp_path_factory.mktemp("others"), text)
    run = start(network, text, "-np", count, "-H", network.list(1), "train.py")
    result = run.finish(2 * PATIENCE)
    assert result.code == 0, result.err
    look(groups, folders, reads)


@pytest.mark.slow  # one of the tests of mpirun looks at what is common to both
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("groups", "local", "reads"),
    [
        pytest.param([[0, 1]], 1, False, id="one"),
        pytest.param([[0, 1]], 2, True, id="one, RANK read"),
        pytest.param([[0], [1]], 2, False, id="two"),
    ],
)
def test_ranks_of_torchrun_do_so_too(
    hosts: Callable[[int], Network], tmp_path: Path, tmp_path_factory, groups: list[list[int]], local: int, reads: bool
) -> None:
    """local: how many on each host. No agent is there to look."""
    network = hosts(2)
    text = lightened(SCRIPT.format(reads=reads, dadt=", dadt", removes=not reads))
    (tmp_path / "train.py").write_text(text)
    folders = mounted(network, groups, tmp_path, tmp_path_factory.mktemp("others"), text)
    torchrun = [Path(sys.executable).with_name("torchrun"), "--nnodes", "2", "--nproc-per-node", local]
    meeting = ["--master-addr", network[0].address, "--master-port", "29400"]
    nodes = [
        subprocess.Popen(
            host.enter([*torchrun, "--node-rank", number, *meeting, "train.py"], tmp_path),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, host in enumerate(network.hosts)
    ]
    said = [node.communicate(timeout=2 * PATIENCE)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    ranks = [[local * host + each for host in group for each in range(local)] for group in groups]
    look(ranks, folders, reads)


def mounted(network: Network, groups: list[list[int]], here: Path, others: Path, script: str) -> list[Path]:
    """The folder of each group of hosts, which all find at the same path."""
    folders = [here]
    for number, group in enumerate(groups[1:]):
        folders.append(others / str(number))
        lay_over(network, group, folders[-1], here)
        (folders[-1] / "train.py").write_text(script)
    return folders


def look(groups: list[list[int]], folders: list[Path], reads: bool) -> None:
    """What the script has written for good in the folder of each group of ranks."""
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
