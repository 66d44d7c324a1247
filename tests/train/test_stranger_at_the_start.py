"""Something that is no rank of the job answers at the ports that a library has opened for the start."""

from __future__ import annotations

import re

import pytest
from harness.survivors import survivors

SCRIPT = r'''
import hashlib, os, re, socket, struct, subprocess, sys, time, torch
from dadt.comm.executors import c10d
rank = int(re.search("DADT_RANK=([0-9]+)", open("/proc/self/environ").read())[1])
torch.set_num_threads(1)
made = 0

def listening():
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try: link = os.readlink(f"/proc/self/fd/{fd}")
        except OSError: continue
        if link.startswith("socket:["): inodes.add(link[8:-1])
    ports = set()
    for table in ("tcp", "tcp6"):
        for row in open(f"/proc/self/net/{table}").read().splitlines()[1:]:
            f = row.split()
            if f[3] == "0A" and f[9] in inodes: ports.add(int(f[1].rpartition(":")[2], 16))
    return ports

STRANGER = """
import socket, struct, sys, time
lines = []
for port in map(int, sys.argv[2:]):
    for number in range(8):
        line = socket.create_connection((sys.argv[1], port))
        line.sendall(struct.pack("<q", number))
        lines.append(line)
print("there", flush=True)
time.sleep(120)
"""
ordinary = c10d.ProcessGroupGloo.create_device
class Faked:
    _Options = c10d.ProcessGroupGloo._Options
    def __new__(cls, *a): return Faked.real(*a)
    real = c10d.ProcessGroupGloo
    @staticmethod
    def create_device(hostname):
        global made
        before = listening()
        device = ordinary(hostname=hostname)
        made += 1
        if made == 1:  # of two ranks the one with the lower port listens, so each rank has a stranger
            command = [sys.executable, "-c", STRANGER, hostname, *map(str, listening() - before)]
            env = {name: value for name, value in os.environ.items() if not name.startswith("DADT")}
            p = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
            assert p.stdout.readline() == b"there\n"
        return device
c10d.ProcessGroupGloo = Faked
torch.manual_seed(0)
model = torch.nn.Linear(8, 4); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    optimizer.zero_grad(); model(torch.randn(4, 8)).pow(2).mean().backward(); optimizer.step()
print("ends with", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest(), flush=True)
'''


@pytest.mark.slow
def test_a_stranger_at_the_start_evicts_nobody(launch) -> None:
    """It takes the connections of ranks before their peers come, and answers nothing."""
    result = launch(SCRIPT, "-np", "4", "--min-np", "2", "--executor", "gloo", "--timeout", "8", "train.py")
    assert result.code == 0, result.err
    ends = survivors(result)
    assert ends.keys() == {0, 1, 2, 3}, result.err
    assert len(set(ends.values())) == 1
    answered = r"127\.0\.0\.1:\d+ \(process \d+, python.* answered there, without a proof of the job's secret"
    assert re.search(answered, result.err), result.err
    assert re.search("the Gloo group (did not prove|broke while) .*: all ranks connect anew", result.err), result.err
    assert "goes on" not in result.err
