"""`dadt run --launcher ray` and `dadt.run(launcher="ray")`: Ray chooses the hosts, and nothing is left in it.

`make .venv-ray/installed` installs Ray, which is large.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from harness import ROOT
from harness.patience import PATIENCE, SETTLE_SECONDS, await_that
from harness.run import await_end_of
from ray_cluster import BIN, ENVIRONMENT, Cluster, RayRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(not BIN.is_dir(), reason="needs `make .venv-ray/installed`"),
]
NO_GPU = ("--ray-resources", "GPU=0")
SHOW = """
import os
names = ("RANK", "LOCAL_RANK", "DADT_ADDRESS", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
print("is", *(os.environ.get(name) or "-" for name in names), os.getcwd())
"""
WAIT = """
import os, pathlib, time
path = pathlib.Path(os.environ["FOLDER"], "ready" + os.environ["RANK"])
path.with_suffix(".new").write_text(str(os.getpid()))
path.with_suffix(".new").rename(path)
while True: time.sleep(600)
"""
TRAIN = """
import hashlib, os, time, torch
model = torch.nn.Linear(100, 10); optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(70):
    optimizer.zero_grad(); model(torch.randn(8, 100)).pow(2).mean().backward(); optimizer.step()
    if step == 20:
        open(os.environ["FOLDER"] + "/ready" + os.environ["RANK"], "w").close()
        while not os.path.exists(os.environ["FOLDER"] + "/go"): time.sleep(0.01)
print("weights", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""


def run(cluster: Cluster, folder: Path, script: str, *arguments: object, **env: str) -> RayRun:
    (folder / "train.py").write_text(script)
    return cluster.run(folder, "-x", f"FOLDER={folder}", *arguments, "train.py", **env)


def begin(cluster: Cluster, folder: Path, script: str = WAIT, *arguments: object) -> RayRun:
    """With four workers, once they run."""
    running = run(cluster, folder, script, "-np", 4, *NO_GPU, *arguments)
    await_that(lambda: len(list(folder.glob("ready[0-9]"))) == 4, "workers")
    return running


def test_workers_run_where_ray_places_them(cluster: Cluster, tmp_path: Path) -> None:
    """Node by node, with the CPUs that they hold, in a copy of the folder."""
    result = run(cluster, tmp_path, SHOW, "-np", 2, "--cpus-per-worker", 2, *NO_GPU).finish()
    assert result.code == 0, result.err
    assert "dadt: 2 workers on 2 hosts" in result.err
    ranks = sorted(line.split()[3:] for line in result.out.decode().splitlines())
    assert [rank[:2] for rank in ranks] == [["0", "0"], ["1", "0"]]
    assert {rank[2] for rank in ranks} == {host.address for host in cluster.network.hosts[1:]}
    assert [rank[3] for rank in ranks] == ["2", "2"]
    assert [rank[4] for rank in ranks] == ["-", "-"]  # though all of Ray's nodes were started with some
    assert all("working_dir_files" in rank[5] for rank in ranks)


def test_gpus_are_those_that_ray_gives(cluster: Cluster, tmp_path: Path) -> None:
    """One each, where the cluster has any. These are none, and Ray does not look."""
    result = run(cluster, tmp_path, SHOW, "-np", 2, "--no-ship", "--gpu-visibility", "all").finish()
    assert result.code == 0, result.err
    ranks = sorted(line.split() for line in result.out.decode().splitlines())
    assert [rank[-2] for rank in ranks] == ["0,1", "0,1"]
    assert {rank[-1] for rank in ranks} == {str(tmp_path)}


def test_workers_that_share_a_gpu(cluster: Cluster, tmp_path: Path) -> None:
    """It is named once where each may use all, and for each where each has one of the list."""
    halves = ["-np", 4, "--ray-resources", "GPU=0.5", "--cpus-per-worker", 0.5, "--no-ship"]
    result = run(cluster, tmp_path, SHOW, *halves, "--gpu-visibility", "all").finish()
    assert result.code == 0, result.err
    assert [line.split()[-2] for line in result.out.decode().splitlines()] == 4 * ["0,1"]
    result = run(cluster, tmp_path, SHOW, *halves).finish()
    assert result.code == 0, result.err
    assert [line.split()[-2] for line in result.out.decode().splitlines()] == 4 * ["0,0,1,1"]  # no GPU is found here


def test_the_same_weights_as_over_ssh(cluster: Cluster, tmp_path: Path) -> None:
    digits = ["--seed", "1", "--log-dir", "logs", ROOT / "examples" / "mnist.py", "--epochs", "1", "--save"]
    data = ["--data", ROOT / "examples" / "data" / "mnist"]
    by_ray = ["-np", 4, *NO_GPU, "--no-ship", *digits, tmp_path / "ray.pt", *data]
    done = cluster.run(tmp_path, *by_ray, OMP_NUM_THREADS="1").finish()
    assert done.code == 0, done.err
    assert "4 workers on 2 hosts" in done.err
    hosts = ",".join(f"{host.address}:2" for host in cluster.network.hosts[1:])
    ssh = [BIN / "dadt", "run", "--ssh-config", cluster.network.config, "-np", 4, "-H", hosts]
    command = [*ssh, *digits, tmp_path / "ssh.pt", *data]
    env = {"HOME": str(cluster.head.home), "OMP_NUM_THREADS": "1"}
    over = RayRun(cluster, tmp_path, command, env).finish()
    assert over.code == 0, over.err
    compare = [BIN / "dadt", "compare", tmp_path / "ray.pt", tmp_path / "ssh.pt"]
    assert subprocess.run(compare, env=ENVIRONMENT, timeout=PATIENCE).returncode == 0


def test_a_cluster_that_is_too_small(cluster: Cluster, tmp_path: Path) -> None:
    result = run(cluster, tmp_path, SHOW, "-np", 3, "--ray-resources", "ssd=1,GPU=0").finish()
    assert result.code == 3
    room = "the cluster has room for 2 of 3 workers of 1 CPU and 1 ssd each; it has"
    assert room in result.err and "2 CPU and 2 ssd on 10.7.0.2" in result.err
    assert len(result.err.splitlines()) == 1
    result = run(cluster, tmp_path, SHOW, "-np", 5, *NO_GPU, "--start-timeout", 5).finish()
    assert result.code == 124
    assert "Ray did not place 5 workers of 1 CPU each within --start-timeout 5 s" in result.err.splitlines()[-1]


def test_without_a_cluster(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHOW)
    result = cluster.run(tmp_path, "-np", 2, "--ray-address", "10.7.0.9:1", "train.py").finish()
    assert result.code == 2
    assert "no Ray cluster is found at 10.7.0.9:1" in result.err
    assert "Traceback" not in result.err


def test_a_worker_fails(cluster: Cluster, tmp_path: Path) -> None:
    running = begin(cluster, tmp_path)
    os.kill(cluster.workers()[0], signal.SIGKILL)
    result = running.finish()
    assert result.code == 137
    assert re.search(r"^  cause +signal 9 \(SIGKILL\), not sent by dadt", result.err, re.MULTILINE)


@pytest.mark.parametrize(
    ("process", "why"),
    [("dadt.launch.agent --connect", "the agent was killed by SIGKILL"), ("ray::RayActor", "Ray: .*died")],
)
def test_an_agent_or_its_actor_is_killed(cluster: Cluster, tmp_path: Path, process: str, why: str) -> None:
    running = begin(cluster, tmp_path)
    os.kill(cluster.processes(process)[0], signal.SIGKILL)
    result = running.finish()
    assert result.code == 3, result.err
    assert re.search(why, result.err), result.err


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_job_that_still_waits_for_places_is_ended(
    cluster: Cluster, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    running = run(cluster, tmp_path, SHOW, "-np", 100, *NO_GPU, "--start-timeout", 100)
    assert running.process.stderr is not None and b"waiting for Ray to place" in running.process.stderr.readline()
    running.signal(number)
    assert running.finish().code == code


def test_ctrl_c(cluster: Cluster, tmp_path: Path) -> None:
    running = begin(cluster, tmp_path)
    workers = cluster.workers()
    running.signal(signal.SIGINT)
    result = running.finish()
    assert result.code == 130
    await_end_of(*workers)


AWAY = """
import ray, dadt
ray.init("{address}", log_to_driver=False)

def plus(number):
    import os
    return number + int(os.environ["RANK"])

print(dadt.run(plus, (10,), np=2, launcher="ray", ray_resources="GPU=0"))
"""


def test_it_is_watched_and_ended(cluster: Cluster, tmp_path: Path) -> None:
    running = begin(cluster, tmp_path, TRAIN)

    def dadt(*arguments: object) -> str:
        result = RayRun(cluster, tmp_path, [BIN / "dadt", *arguments], {}).finish()
        assert result.code == 0, result.err
        return result.out.decode()

    assert re.search(rf"^{running.job} .* 2 hosts x 2 +[-\d]+ +\w+ +train.py", dadt("ps"), re.MULTILINE)
    stacks = dadt("stacks", running.job)
    assert set(re.findall(r"^rank (\d) on 10.7.0.[23], pid \d+: ", stacks, re.MULTILINE)) == set("0123"), stacks
    assert stacks.count('train.py", line') == 4, stacks
    assert dadt("kill", running.job).startswith(f"job {running.job} has ended: rank 0")
    assert running.finish().code == 143


def test_from_outside_of_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    address = f"ray://{cluster.head.address}:10001"
    result = run(cluster, tmp_path, SHOW, "-np", 4, *NO_GPU, "--ray-address", address).finish()
    assert result.code == 0, result.err
    assert result.out.decode().count("working_dir_files") == 4
    (tmp_path / "call.py").write_text(AWAY.format(address=address))
    result = RayRun(cluster, tmp_path, [BIN / "python", "call.py"], {}).finish()
    assert (result.code, result.out.split()[-2:]) == (0, [b"[10,", b"11]"]), result.err


def test_what_is_no_cluster(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHOW)
    for address in (f"http://{cluster.head.address}:8265", f"ray://{cluster.address}"):
        result = cluster.run(tmp_path, "-np", 2, "--ray-address", address, "train.py").finish()
        assert result.code == 2, result.err
        assert re.fullmatch("dadt: --launcher ray: .+\n", result.err), result.err


def test_the_launcher_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    running = begin(cluster, tmp_path)
    running.signal(signal.SIGKILL)
    running.finish()  # the fixture looks at what is left


def test_two_jobs_at_once(cluster: Cluster, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    running = [run(cluster, folder, SHOW, "-np", 2, *NO_GPU) for folder in folders]
    for each in running:
        result = each.finish()
        assert result.code == 0, result.err
        assert len(result.out.splitlines()) == 2


def test_a_job_of_rays(cluster: Cluster, tmp_path: Path) -> None:
    """Its folder is Ray's matter. `ray job stop` ends all of it."""
    env = {"RAY_ADDRESS": f"http://{cluster.head.address}:8265"}
    (tmp_path / "train.py").write_text(SHOW)
    submit = [BIN / "ray", "job", "submit", "--working-dir", tmp_path]
    command = [BIN / "dadt", "run", "--launcher", "ray", "-np", 4, *NO_GPU, "train.py"]
    result = RayRun(cluster, tmp_path, [*submit, "--", *command], env).finish()
    assert result.code == 0, result.err
    assert result.out.decode().count("] is ") == 4, result.out.decode()
    (tmp_path / "train.py").write_text(WAIT)
    told = json.dumps({"env_vars": {"FOLDER": str(tmp_path)}})
    waits = [*submit, "--submission-id=waits", "--no-wait", "--runtime-env-json", told]
    assert RayRun(cluster, tmp_path, [*waits, "--", *command], env).finish().code == 0
    await_that(lambda: len(list(tmp_path.glob("ready[0-9]"))) == 4, "workers")
    assert RayRun(cluster, tmp_path, [BIN / "ray", "job", "stop", "waits"], env).finish().code == 0
    await_that(lambda: not cluster.workers(), "the end of the workers", seconds=SETTLE_SECONDS)


CALL = """
import os, numpy, ray, torch, dadt
ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False)
big = torch.arange(5_000_000)
splits = ray.data.range(64).streaming_split(2, equal=True)

def work(tensor, parts):
    rank = int(os.environ["RANK"])
    seen = [int(n) for batch in parts[rank].iter_torch_batches(batch_size=8) for n in batch["id"]]
    return rank, int(tensor.sum()), seen

def trains(parts):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for batch in parts[int(os.environ["RANK"])].iter_torch_batches(batch_size=8):
        optimizer.zero_grad()
        model(batch["id"][:, None].float()).square().mean().backward()
        optimizer.step()
    return model.weight.item()

def fails():
    if os.environ["RANK"] == "1":
        raise KeyError("this one")

settings = {"np": 2, "launcher": "ray", "ray_resources": "GPU=0"}
results = dadt.run(work, (big, splits), **settings)
assert [rank for rank, _, _ in results] == [0, 1]
assert {total for _, total, _ in results} == {int(big.sum())}
assert sorted(results[0][2] + results[1][2]) == list(range(64)), results
assert len(set(dadt.run(trains, (splits,), **settings))) == 1
try:
    dadt.run(trains, (splits,), min_np=1, **settings)
except dadt.errors.ConfigError as error:
    assert "a streaming_split of ray.data waits at each pass" in str(error), error
else:
    raise AssertionError("the split is read")
try:
    dadt.run(fails, **settings)
except KeyError as error:
    assert "this one" in str(error) and "in worker 1" in str(error.__cause__)
    print("well")
"""


def test_a_function(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "call.py").write_text(CALL)
    result = RayRun(cluster, tmp_path, [BIN / "python", "call.py"], {}).finish()
    assert result.code == 0, result.err
    assert result.out.split()[-1] == b"well", result.err
    assert result.err.count("ray.data (streaming_split): shares out its data itself, left as it is.") == 2


ANEW = """
import pathlib, dadt, ray

def value():
    import helper
    return helper.VALUE

for number in (1, 20):
    pathlib.Path("helper.py").write_text(f"VALUE = {number}")
    print(dadt.run(value, np=4, launcher="ray", ray_resources="GPU=0"), ray.is_initialized())
"""


def test_a_second_call_takes_along_what_has_changed(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "call.py").write_text(ANEW)
    result = RayRun(cluster, tmp_path, [BIN / "python", "call.py"], {}).finish()
    assert result.code == 0, result.err
    assert result.out.decode().splitlines() == ["[1, 1, 1, 1] False", "[20, 20, 20, 20] False"]


def test_check_env(cluster: Cluster, tmp_path: Path) -> None:
    result = RayRun(cluster, tmp_path, [BIN / "dadt", "check-env"], {}).finish()
    said = result.out.decode()
    assert re.search(r"pass +Ray +3 nodes", said), said
    for host in cluster.network.hosts:
        assert re.search(rf"pass +Ray node {host.address} +.*Python 3.*, ray 2.*, torch .*, dadt ", said), said
