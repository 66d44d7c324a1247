"""`import dadt` over several hosts: who is who, process sets within and across them, barriers of one of them."""

from __future__ import annotations

SCRIPT = """
import dadt, pathlib, sys, time, torch
dadt.init()
rank = dadt.rank()
found = [rank, dadt.local_rank(), dadt.local_size(), dadt.cross_rank(), dadt.cross_size()]
found.append(dadt.all_reduce(torch.full((70000,), rank + 1.0), "sum")[-1].item())
for ranks in ([0, 1], [1, 2], [3, 0, 2]):
    some = dadt.add_process_set(ranks)
    found.append(dadt.all_reduce(torch.tensor(rank + 1.0), "sum", process_set=some).item() if some.included else 0)
if rank == 1:
    time.sleep(0.2)  # or rank 0 would not have to wait
    pathlib.Path("came").touch()
if dadt.cross_rank() == 0:
    dadt.local_barrier()
    found.append(pathlib.Path("came").exists())
sys.stdout.write(f"{found}\\n")
"""


def test_two_hosts_of_two_ranks(hosts, start) -> None:
    result = start(hosts(2), SCRIPT, "-H", "h0:2,h1:2", "train.py").finish()
    assert result.code == 0, result.err
    said = sorted(line.decode().split("] ", 1)[1] for line in result.out.splitlines())
    assert said == [
        "[0, 0, 2, 0, 2, 10.0, 3.0, 0, 8.0, True]",
        "[1, 1, 2, 0, 2, 10.0, 3.0, 5.0, 0, True]",
        "[2, 0, 2, 1, 2, 10.0, 0, 5.0, 8.0]",
        "[3, 1, 2, 1, 2, 10.0, 0, 0, 8.0]",
    ]
