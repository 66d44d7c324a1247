"""`--link paced:SPEED`: connections between ranks that are as slow as told, and what it does not go with."""

from __future__ import annotations

import os
import socket
import struct
from statistics import median

import pytest
from harness import job

from dadt.config import Config
from dadt.control import pacing
from dadt.errors import ConfigError
from dadt.launch.start import plan

RATE = 80e6 / 8
"""Bytes per second."""
TRAIN = """
import signal, time
torch.manual_seed(0)
model = nn.Linear(1000, 1000)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
seconds = []
for step in range(14):
    if rank == 2 and step == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.perf_counter()
    optimizer.zero_grad()
    model(torch.randn(4, 1000)).square().mean().backward()
    optimizer.step()
    seconds.append(time.perf_counter() - begun)
report((seconds, model.weight.detach()))
"""


def test_an_exchange_takes_as_long_as_its_bytes_also_once_a_rank_is_lost(tmp_path):
    options = ["--algorithm", "sync", "--min-np", "2", "--link", "paced:80mbit"]
    done = job.run(tmp_path, TRAIN, *options, np=3)
    assert "executor tcp" in done.output and "2 of 3 workers train on" in done.output
    assert len(done.ranks) == 2
    size = 4 * 1001 * 1000
    for seconds, weight in done.ranks:
        assert median(seconds[1:6]) > 0.8 * 2 * 2 / 3 * size / RATE
        assert median(seconds[8:]) > 0.8 * size / RATE
        assert weight.equal(done.ranks[0][1])


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"link": "paced:fast"}, "--link paced:fast: give a speed as 100mbit, 1gbit or paced:1gbit"),
        ({"link": "paced:"}, "--link paced:: give a speed"),
        ({"executor": "shm"}, "--link paced:1gbit: paces TCP connections, and --executor shm has others -> give tcp"),
        ({"executor": "nccl"}, "--executor nccl has others"),
        ({"executor": "mpi"}, "--executor mpi has others"),
        ({"broadcast_executor": "shm"}, "--executor shm has others"),
        ({"latency": "5ms"}, "paces connections of workers on this host alone; leave --latency out"),
        ({"simulate_hosts": 2}, "leave --simulate-hosts out"),
        ({"hosts": "a,b"}, "leave -H out"),
        ({"nnodes": 2}, "leave --nnodes out"),
        ({"launcher": "slurm"}, "leave --launcher slurm out"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_it_does_not_go_with_is_said(knobs, words):
    with pytest.raises(ConfigError) as caught:
        Config(**{"link": "paced:1gbit", **knobs})
    assert words in str(caught.value)


def test_its_workers_are_on_this_host_also_in_an_allocation():
    config = Config(np=2, link="paced:1gbit")
    (host,) = plan.hosts_of(config, {"SLURM_JOB_ID": "1", "SLURM_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "1(x2)"})
    assert (host.name, host.slots) == ("", 2)


def test_a_kernel_that_paces_nothing_is_told_of(monkeypatch):
    class Forgetful(socket.socket):
        def getsockopt(self, *_):
            return struct.pack("=Q", 2**64 - 1)

    class Refusing(socket.socket):
        def setsockopt(self, *_):
            raise OSError(92, "Protocol not available")

    for kind, why in ((Forgetful, "the speed did not stick"), (Refusing, "Protocol not available")):
        monkeypatch.setattr(pacing.socket, "socket", kind)
        with pytest.raises(ConfigError, match=rf"this kernel does not pace TCP connections \({why}\) -> use Linux 5"):
            plan.hosts_of(Config(np=2, link="paced:1gbit"), {})


def test_only_connections_that_are_made_meanwhile_are_paced():
    def pace(connection: socket.socket) -> int:
        return struct.unpack("=Q", connection.getsockopt(socket.SOL_SOCKET, 47, 8))[0]

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as before:
        usual, open_files = pace(before), len(os.listdir("/proc/self/fd"))
        with pacing.paced(5e9):  # more than 32 bits
            meanwhile = socket.create_connection(server.getsockname())
        assert len(os.listdir("/proc/self/fd")) == open_files + 1
        with meanwhile, socket.create_connection(server.getsockname()) as after:
            assert [pace(each) for each in (before, meanwhile, after)] == [usual, 5_000_000_000, usual]
