"""Simulated hosts: how fast the link between them is, and that nothing is left of it whatever ends the job."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from harness.patience import PATIENCE, SETTLE_SECONDS, await_that
from harness.run import is_running, left_of

from dadt.config import Config
from dadt.errors import ConfigError
from dadt.launch.hosts import simulated
from dadt.launch.start import plan

RATE = 40e6
"""Bits per second."""
SEND = """\
import os, socket, time
rank, place = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
size = 2 << 20
def ready():
    with open(f"ready{rank}", "w") as file: file.write(str(os.getpid()))
if rank == 0:
    with socket.create_server(place) as server:
        open("listens", "w").close()
        other, _ = server.accept()
    speeds = []
    for _ in range(5):
        begun = time.perf_counter()
        other.sendall(b"!")
        got = 0
        while got < size:
            got += len(other.recv(1 << 16))
        speeds.append(8 * size / (time.perf_counter() - begun))
    with open("measured", "w") as file: print(max(speeds), place[0], file=file)  # other processes take time, too
    ready()
else:
    while not os.path.exists("listens"): time.sleep(0.01)
    with socket.create_connection(place) as other:
        for _ in range(5):
            other.recv(1)
            other.sendall(bytes(size))
    ready()
while True: time.sleep(600)
"""


def networks(process: str = "[0-9]*") -> set[str]:
    """Namespaces that it, or else any process, is in or holds open."""
    found = set()
    for each in [*Path("/proc").glob(f"{process}/ns/net"), *Path("/proc").glob(f"{process}/fd/*")]:
        try:
            name = os.readlink(each)
        except OSError:
            continue  # it ended while we looked
        if name.startswith("net:"):
            found.add(name)
    return found


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


@pytest.mark.alone
@pytest.mark.skipif(os.geteuid() != 0, reason="networks can be made by root only")
def test_a_link_is_as_fast_as_told_and_nothing_is_left_of_it_after_a_kill(start):
    before = interfaces()
    run = start(SEND, "-np", "2", "--link", "40mbit", "--inject", "none", "train.py")
    workers = run.wait_for("ready0", "ready1")
    job = run.job
    speed, address = (run.folder / "measured").read_text().split()
    assert 0.7 * RATE < float(speed) < 1.1 * RATE
    assert address.startswith("10.77.0.")
    made = networks(str(run.process.pid)) - networks("self")  # other tests make networks meanwhile
    assert len(made) == 3  # the switch, too
    assert len({os.readlink(f"/proc/{pid}/ns/net") for pid in workers} & made) == 2
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    await_that(
        lambda: not left_of(job) and not any(map(is_running, workers)), "the end of the workers", seconds=SETTLE_SECONDS
    )
    await_that(lambda: not made & networks(), f"the end of the networks {made}", seconds=SETTLE_SECONDS)
    assert interfaces() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="networks can be made by root only")
def test_latency_is_had_or_refused_in_a_sentence():
    network = simulated.Network(simulated.SimulatedLink(latency=0.02))
    try:
        first, second = network.add(), network.add()
    except ConfigError as error:
        assert str(error) == "--latency: this kernel has no netem -> modprobe sch_netem, or leave --latency out"
        return
    else:
        ping = [*first, "ping", "-c", "3", "-i", "0.2", "-q", "10.77.0.2"]
        if shutil.which("ping"):
            said = subprocess.run(ping, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
            least = float(said.split(" = ")[1].split("/")[0])
            assert 40 <= least < 60, said  # there and back
        assert second
    finally:
        network.close()


def test_hosts_are_made_up_and_workers_shared_out(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/sbin/{name}")

    def slots(**knobs: object) -> dict[str, int]:
        return {host.name: host.slots for host in plan.hosts_of(Config(**knobs), {})}

    assert slots(np=2, link="1gbit") == {"sim0": 1, "sim1": 1}
    assert slots(np=5, simulate_hosts=2) == {"sim0": 3, "sim1": 2}
    assert slots(simulate_hosts=2, latency="5ms") == {"sim0": 1, "sim1": 1}


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"link": "fast"}, "--link fast: give a speed as 100mbit"),
        ({"link": "0gbit"}, "--link 0gbit: give a speed"),
        ({"link": "1gbit", "latency": "5"}, "--latency 5: give a time as 500us or 5ms"),
        ({"link": "1gbit", "hosts": "a,b"}, "--link 1gbit: simulates hosts on this machine; leave -H out"),
        ({"link": "1gbit"}, "--link 1gbit: 0 workers on 0 simulated hosts; give -np N"),
        ({"simulate_hosts": 3, "np": 2}, "--simulate-hosts 3: 2 workers on 3 simulated hosts"),
    ],
)
def test_what_cannot_be_simulated_is_said(knobs, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        plan.hosts_of(Config(**{"np": 0, **knobs}), {})


def test_others_than_root_are_told(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="--link 1gbit: networks can be made by root only -> sudo"):
        plan.hosts_of(Config(np=2, link="1gbit"), {})


def test_a_machine_without_tc_is_told(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else name)
    with pytest.raises(ConfigError, match="--link 1gbit: there is no tc on this machine -> install iproute2"):
        plan.hosts_of(Config(np=2, link="1gbit"), {})


def test_the_speed_is_in_bits():
    assert simulated.link_of(Config(link="2.5gbit", latency="500us")) == simulated.SimulatedLink(2.5e9, 500e-6)
