"""Ranks that are left after a loss train on over the connections that they have, whatever was under way on these."""

from __future__ import annotations

import json

import pytest

SCRIPT = """
import json, os, re, signal, sys, threading, torch
import psutil
torch.set_num_threads(1)
environment = open("/proc/self/environ").read()
rank, = (int(each) for each in re.findall("DADT_RANK=([0-9]+)", environment))
victims = json.loads(sys.argv[1])  # the step in which a rank is killed, by rank

def sockets():
    # The inodes of the connections with other ranks; what goes to agent and launcher are Unix sockets.
    found = psutil.Process().net_connections("tcp")
    return sorted(os.fstat(one.fd).st_ino for one in found if one.status == psutil.CONN_ESTABLISHED)

model = torch.nn.Linear(2000, 1000, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
told = []
for step in range(24):
    optimizer.zero_grad()
    if step == victims.get(str(rank)):  # it is killed in the midst of an exchange
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGKILL)).start()
    (model.weight * (rank + 1)).sum().backward()
    told += [sockets()] if step in (4, 23) else []
    optimizer.step()
values = set(model.weight.detach().flatten().tolist())
print("ends with", json.dumps({"values": sorted(values), "before": told[0], "after": told[1]}), flush=True)
"""


def sums(victims: list[int], ranks: list[int], steps: int) -> set[float]:
    """All sums of the averages of so many steps, as it depends on the moment how many steps a victim takes part in."""
    mean = sum(rank + 1 for rank in ranks) / len(ranks)
    if not victims:
        return {steps * mean}
    first, *rest = victims
    left = [rank for rank in ranks if rank != first]
    return {mean * taken + more for taken in range(8, steps) for more in sums(rest, left, steps - taken)}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("victims", "streams", "options"),
    [
        ({"3": 8}, 3, ["--executor", "tcp"]),
        ({"0": 8, "2": 14}, 1, ["--executor", "tcp"]),
        ({"3": 8}, 2, ["--executor", "hierarchical:tcp", "--simulate-hosts", "2"]),
    ],
)
def test_sums_are_exact_over_the_same_sockets(
    launch, victims: dict[str, int], streams: int, options: list[str]
) -> None:
    settings = ["-np", "4", "--min-np", "1", "--algorithm", "sync", "--streams", f"{streams}", "--compression", "none"]
    result = launch(SCRIPT, *settings, *options, "train.py", json.dumps(victims))
    assert result.code == 0, result.err
    lines = [line.partition("ends with ")[2] for line in result.out.decode().splitlines() if "ends with" in line]
    ranks = [json.loads(line) for line in lines]
    assert len(ranks) == 4 - len(victims)
    assert len({tuple(rank["values"]) for rank in ranks}) == 1
    (value,) = ranks[0]["values"]
    assert -value in sums(list(map(int, victims)), [0, 1, 2, 3], 24)
    for rank in ranks:
        assert set(rank["after"]) < set(rank["before"])
        assert len(rank["after"]) >= (2 + streams) * (len(ranks) - 1)
