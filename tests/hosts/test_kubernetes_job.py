"""examples/kubernetes/job.yaml: its commands train, on machines that stand for its pods, as Kubernetes starts them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import yaml
from harness import ROOT
from harness.machine import Machine, Network
from harness.run import DADT, SECONDS


def test_its_pods_meet_and_train(hosts: Callable[[int], Network], tmp_path: Path) -> None:
    service, job = yaml.safe_load_all((ROOT / "examples" / "kubernetes" / "job.yaml").read_text())
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    count = spec["completions"]
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] == count == 2
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}

    network = hosts(count)
    # A pod is known by its job's name, its index and its service.
    pods = [f"{job['metadata']['name']}-{index}.{service['metadata']['name']}" for index in range(count)]
    for machine in network.hosts:
        with (machine.folder / "hosts").open("a") as file:
            file.writelines(f"{other.address} {pod}\n" for pod, other in zip(pods, network.hosts, strict=True))
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def start(machine: Machine, index: int, secret: str) -> subprocess.Popen[str]:
        command = [part.replace("$(JOB_COMPLETION_INDEX)", str(index)) for part in container["command"]]
        assert "$(" not in " ".join(command)
        command[command.index("--epochs") + 1] = "1"
        (variable,) = container["env"]
        assert variable["name"] == "DADT_SECRET" and "secretKeyRef" in variable["valueFrom"]
        return subprocess.Popen(
            # In a container the first process is the command's.
            machine.enter(["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command], tmp_path),
            env={
                **os.environ,
                variable["name"]: secret,
                "PATH": f"{Path(DADT[0]).parent}{os.pathsep}{os.environ['PATH']}",
                "HOME": str(machine.home),
                "CUDA_VISIBLE_DEVICES": "-1",
                "OMP_NUM_THREADS": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    second, first = (start(network[index], index, "what openssl rand -hex 32 prints") for index in (1, 0))
    (out, _), (said, _) = first.communicate(timeout=SECONDS), second.communicate(timeout=SECONDS)
    assert (first.returncode, second.returncode) == (0, 0), out + said
    assert "dadt: 2 workers on 2 hosts" in out
    assert "[1 node1] epoch 1 " in out
    assert f"at {pods[0]}:29400" in said
