"""Nodes that Ray loses, gets back, or starts for a job."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from harness import ROOT
from harness.machine import Machine
from harness.patience import PATIENCE, await_that
from hosts.test_joining_hosts import REPLAYED, read_until
from ray_cluster import BIN, Cluster, RayRun
from test_ray import NO_GPU, SHOW, TRAIN, begin, pytestmark, run

__all__ = ["pytestmark"]


def end_of(node: Machine) -> None:
    raylets = [pid for pid, command in node.processes().items() if "raylet/raylet " in command]
    os.kill(raylets[0], signal.SIGKILL)


def test_the_end_of_a_node(cluster: Cluster, tmp_path: Path) -> None:
    """Its raylet is killed."""
    running = begin(cluster, tmp_path)
    node = cluster.network[2]
    end_of(node)
    try:
        result = running.finish()
        assert result.code == 3, result.err
        assert f"dadt: waiting for Ray to say why {node.address} is gone, for" in result.err
        told = rf"dadt: {node.address}: Ray has lost this node: .+; all its workers were stopped"
        assert re.fullmatch(told, result.err.splitlines()[-1]), result.err
    finally:
        cluster.again(node)


def test_a_node_that_is_drained(cluster: Cluster, tmp_path: Path) -> None:
    """As one of a provider that takes it back: the job runs until it is gone, after the time that is given."""
    running = begin(cluster, tmp_path)
    node, reason = cluster.network[2], "the provider wants it back"
    here = f"each['Alive'] and each['NodeManagerAddress'] == '{node.address}'"
    of_node = f"next(each['NodeID'] for each in ray.nodes() if {here})"
    drain = ["drain-node", f"--address={cluster.address}", f"--node-id={cluster.asks(of_node)}"]
    why = ["--reason=DRAIN_NODE_REASON_PREEMPTION", f"--reason-message={reason}", "--deadline-remaining-seconds=1"]
    assert RayRun(cluster, tmp_path, [BIN / "ray", *drain, *why], {}).finish().code == 0
    assert len(cluster.workers()) == 4
    end_of(node)
    try:
        result = running.finish()
        assert result.code == 3, result.err
        last = f"dadt: {node.address}: Ray has lost this node: {reason}; all its workers were stopped"
        assert result.err.splitlines()[-1] == last
        assert result.out == b""  # Ray prints there what the node has logged
    finally:
        cluster.again(node)


def test_a_job_trains_on_without_a_node(cluster: Cluster, tmp_path: Path) -> None:
    running = begin(cluster, tmp_path, TRAIN, "--min-np", 1, "--warmup-steps", 10)
    node = cluster.network[2]
    end_of(node)
    try:
        read_until(running, "training goes on without it")  # or all would have ended before
        (tmp_path / "go").touch()
        result = running.finish()
        assert result.code == 0, result.err
        weights = re.findall(r"weights (\w+)", result.out.decode())
        assert len(weights) == 2 and len(set(weights)) == 1, result.out
    finally:
        cluster.again(node)


def rank_in(pid: int) -> str:
    return re.findall(rb"DADT_RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())[0].decode()


def test_a_new_node_is_taken_in(cluster: Cluster, tmp_path: Path) -> None:
    """Ray places the lost bundle there, once it has come, and the script is made again."""
    options = ["--cpus-per-worker", 2, *NO_GPU, "--no-ship", "--min-np", 1, "--snapshot-every", "1000steps"]
    running = run(cluster, tmp_path, REPLAYED, "-np", 2, *options, "--executor", "gloo", "--output", "all")
    await_that((tmp_path / "ready").exists, "20 steps")
    (node,) = (each for each in cluster.network.hosts[1:] if {*map(rank_in, cluster.of(each, "train.py"))} == {"0"})
    end_of(node)
    cluster.again(node)
    result = running.finish()
    assert result.code == 0, result.err
    assert re.search(rf"{node.address}\S* joins: new workers start there in place of rank 0", result.err), result.err
    told = re.findall(rb"\[(\d)[^]]*\] ends at (\d+ [-\d.e]+)", result.out)
    assert {rank for rank, _ in told} == {b"0", b"1"} and len({end for _, end in told}) == 1, result.out


SCALING = """
cluster_name: scaling
max_workers: 2
idle_timeout_minutes: 0.1
provider: {type: fake_multinode, use_node_id_as_ip: true, disable_node_updaters: true,
    disable_launch_config_check: true, launch_multiple: true}
head_node_type: ray.head.default
available_node_types:
    ray.head.default: {resources: {CPU: 0}, node_config: {}, max_workers: 0}
    worker: {resources: {CPU: 2, object_store_memory: 100000000}, node_config: {}, max_workers: 2}
auth: {}
file_mounts: {}
cluster_synced_files: []
file_mounts_sync_continuously: false
rsync_exclude: []
rsync_filter: []
initialization_commands: []
setup_commands: []
head_setup_commands: []
worker_setup_commands: []
head_start_ray_commands: []
worker_start_ray_commands: []
"""
"""Every field is needed: Ray's wheel lacks the example that has the others' defaults."""


@pytest.fixture
def scaling(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster without a node for workers. Ray's own autoscaler starts up to two of 2 CPUs, on the head's machine."""
    file = tmp_path / "scaling.yaml"
    file.write_text(SCALING)
    (tmp_path / "hosts").mkdir()
    cluster = Cluster(tmp_path / "hosts", head=[f"--autoscaling-config={file}"])
    yield cluster
    cluster.close()


def test_an_autoscaler_starts_nodes(scaling: Cluster, tmp_path: Path) -> None:
    result = run(scaling, tmp_path, SHOW, "-np", 4).finish()
    assert result.code == 3
    assert "the cluster has room for 0 of 4 workers of 1 CPU each; it has nothing on" in result.err
    # Its nodes share a machine, on which each would remove the folders of the other.
    result = run(scaling, tmp_path, SHOW, "-np", 4, "--no-ship", "--start-timeout", 100).finish()
    assert result.code == 0, result.err
    assert "waiting for Ray to place 4 workers of 1 CPU each, for 100 s at most" in result.err
    assert "4 workers on 2 hosts" in result.err
    assert result.out.decode().count("] is ") == 4
    await_that(lambda: scaling.alive == 1, "the nodes' end, as they are idle")


@pytest.mark.timeout(420)
def test_the_example_for_kubernetes(tmp_path: Path) -> None:
    """Its command trains in a cluster as KubeRay makes it, with the project where the image has it."""
    spec = yaml.safe_load((ROOT / "examples/kubernetes/rayjob.yaml").read_text())["spec"]
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    head = [f"--{name}={value}" for name, value in spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].items()]
    pods = group["replicas"] * [f"--num-cpus={container['resources']['limits']['cpu']}"]
    assert head == ["--num-cpus=0"] and len(pods) == 2
    (tmp_path / "hosts").mkdir()
    cluster = Cluster(tmp_path / "hosts", *pods)
    try:
        command = spec["entrypoint"].replace("/dadt", str(ROOT)).split()
        submit = [BIN / "ray", "job", "submit", "--", *command]
        result = RayRun(cluster, tmp_path, submit, {"RAY_ADDRESS": f"http://{cluster.head.address}:8265"}).finish(
            3 * PATIENCE
        )
        assert result.code == 0, result.err
        assert "4 workers on 2 hosts" in result.out.decode()
        assert re.search(r"accuracy 0\.9", result.out.decode()), result.out.decode()
    finally:
        cluster.close()
