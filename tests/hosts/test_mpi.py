"""Ranks of MPI on simulated machines: by `dadt run --launcher mpi`, and by mpirun itself."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import lightened
from harness.patience import PATIENCE, SETTLE_SECONDS, await_that

MPIRUNS = {"mpirun.openmpi": "openmpi-bin", "mpirun.mpich": "mpich"}
WHERE = """
import os, socket, sys
names = "DADT_RANK", "DADT_LOCAL_RANK", "DADT_CROSS_RANK"
rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
sys.stdout.write(" ".join([*(os.environ[name] for name in names), socket.gethostname(), rank]) + "\\n")
"""
TRAIN = """
import sys, torch{dadt}
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
with open("log", "a") as log:
    log.write("trained")
sys.stdout.write(str(model.weight.sum().item()) + "\\n")
"""
WAIT = """
import os, time
rank = os.environ["RANK"]
with open(f"ready{rank}.part", "w") as file: file.write(str(os.getpid()))
os.rename(f"ready{rank}.part", f"ready{rank}")
while True: time.sleep(600)
"""


@pytest.fixture(params=MPIRUNS)
def mpirun(request):
    if shutil.which(request.param) is None:
        reason = f"there is no {request.param} (apt-get install {MPIRUNS[request.param]})"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return request.param


def test_workers_run_on_their_hosts(hosts, start, mpirun):
    network = hosts(2)
    by = ["--launcher", "mpi", "--mpirun", mpirun, "-H", "h0:2,h1:2"]
    result = start(network, WHERE, *by, "train.py").finish()
    assert result.code == 0, result.err
    said = sorted(line.split(b"] ", 1)[1] for line in result.out.splitlines())
    assert said == [b"0 0 0 h0 0", b"1 1 0 h0 1", b"2 0 1 h1 2", b"3 1 1 h1 3"]


@pytest.mark.parametrize(
    "mpirun", ["mpirun.openmpi", pytest.param("mpirun.mpich", marks=pytest.mark.slow)], indirect=True
)
def test_training_goes_over_the_network(hosts, start, mpirun):
    network = hosts(2)
    by = ["--launcher", "mpi", "--mpirun", mpirun, "-H", "h0:1,h1:1"]
    result = start(network, TRAIN.format(dadt=""), *by, "train.py").finish()
    assert result.code == 0, result.err
    assert "2 workers on 2 hosts, executor tcp" in result.err
    assert len({line.split(b"] ", 1)[1] for line in result.out.splitlines()}) == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("who", ["the launcher", "an agent"])
def test_kill_9_leaves_nothing_on_any_host(hosts, start, mpirun, tmp_path, who):
    network = hosts(2)
    run = start(network, WAIT, "--launcher", "mpi", "--mpirun", mpirun, "-H", "h0:1,h1:1", "train.py")
    await_that(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists(), "the workers")
    if who == "the launcher":
        run.process.kill()
    else:
        agents = [pid for pid, command in network.hosts[1].processes().items() if "-m dadt.launch.agent" in command]
        os.kill(agents[0], signal.SIGKILL)
    result = run.finish()
    assert result.code != 0
    await_that(lambda: not network.leftovers(), f"the end of {network.leftovers()}", seconds=SETTLE_SECONDS)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("mpirun", "way"),
    [
        ("mpirun.openmpi", "mpi4py"),
        ("mpirun.mpich", "MASTER_ADDR"),
        pytest.param("mpirun.openmpi", "MASTER_ADDR", marks=pytest.mark.slow),
    ],
    indirect=["mpirun"],
)
def test_scripts_that_import_dadt_need_no_dadt_run(hosts, mpirun, tmp_path, way):
    if way == "mpi4py" and importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    network = hosts(2)
    (tmp_path / "train.py").write_text(lightened(TRAIN.format(dadt=", dadt")))
    (tmp_path / "hosts").write_text("h0:1\nh1:1\n" if "mpich" in mpirun else "h0 slots=1\nh1 slots=1\n")
    env = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "HOME": str(network.launcher.home)}
    env |= {"OMPI_MCA_plm_rsh_args": f"-F {network.config}", "HYDRA_LAUNCHER_EXTRA_ARGS": f"-F {network.config}"}
    exported = []
    if way == "MASTER_ADDR":
        env |= {"MASTER_ADDR": network.hosts[0].address, "MASTER_PORT": "29500"}
        exported = [] if "mpich" in mpirun else ["-x", "MASTER_ADDR", "-x", "MASTER_PORT"]
    command = [mpirun, "-np", "2", "-hostfile" if "openmpi" in mpirun else "-f", "hosts", *exported]
    done = subprocess.run(
        network.launcher.enter([*command, sys.executable, "train.py"], tmp_path),
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "dadt: 2 ranks by" in done.stderr and "executor tcp" in done.stderr
    assert "dadt: done: 5 steps" in done.stderr
    assert len(set(done.stdout.split())) == 1
    assert (tmp_path / "log").read_text() == "trained", "one of two hosts that see this folder writes there"


@pytest.mark.slow
def test_torchrun_on_each_host(hosts, tmp_path):
    network = hosts(2)
    (tmp_path / "train.py").write_text(lightened(TRAIN.format(dadt=", dadt")))
    torchrun = [Path(sys.executable).with_name("torchrun"), "--nnodes", "2", "--nproc-per-node", "1"]
    meeting = ["--master-addr", network.hosts[0].address, "--master-port", "29400"]
    nodes = [
        subprocess.Popen(
            host.enter([*torchrun, "--node-rank", number, *meeting, "train.py"], tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, host in enumerate(network.hosts)
    ]
    said = [node.communicate(timeout=PATIENCE) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "dadt: 2 ranks by torchrun, executor tcp" in said[0][1]
    assert "dadt: done: 5 steps" in said[0][1]
    assert len({out for out, _ in said}) == 1
