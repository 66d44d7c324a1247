"""examples/kubernetes: their commands train, on machines that stand for the pods, as Kubernetes starts them.

What they say where a pod is missing stands in docs/kubernetes.md. The RayJob's command runs within Ray, not here.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from harness import ROOT, forkserver
from harness.machine import FOLDERS, Machine, Network
from harness.patience import PATIENCE, await_that

Resource = dict[str, Any]
SECRET = "what openssl rand -hex 32 prints"
SLEEP = """
import os, pathlib, time
pathlib.Path("up" + os.environ["RANK"]).touch()
time.sleep(600)
"""


@dataclass(frozen=True)
class Pods:
    """What the controllers of Kubernetes make of an example."""

    names: list[str]
    """Under these the pods find each other."""
    container: Resource

    @property
    def secret(self) -> str:
        """The one variable of the example's own, whose value comes from a Secret."""
        (variable,) = self.container["env"]
        assert "secretKeyRef" in variable["valueFrom"]
        return str(variable["name"])


def of_job(job: Resource, name: str, subdomain: str) -> Pods:
    """The Job controller names the pods of an Indexed Job by their index; a headless Service adds the subdomain."""
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"]
    (container,) = spec["template"]["spec"]["containers"]
    return Pods([f"{name}-{index}.{subdomain}" for index in range(spec["completions"])], container)


def of_job_and_service(service: Resource, job: Resource) -> Pods:
    name, subdomain = job["metadata"]["name"], service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name}
    assert job["spec"]["template"]["spec"]["subdomain"] == subdomain
    return of_job(job, name, subdomain)


def of_jobset(jobset: Resource) -> Pods:
    """JobSet makes Jobs SET-JOB-NUMBER, and a headless Service that has the set's name."""
    name, spec = jobset["metadata"]["name"], jobset["spec"]
    assert spec["network"] == {"enableDNSHostnames": True}
    (job,) = spec["replicatedJobs"]
    assert "replicas" not in job  # one Job
    return of_job(job["template"], f"{name}-{job['name']}-0", name)


def of_trainjob(runtime: Resource, trainjob: Resource) -> Pods:
    """Trainer makes a JobSet by the TrainJob's name: the runtime's, in which it fills in what the TrainJob says."""
    reference = {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    assert trainjob["spec"]["runtimeRef"] == reference
    trainer, spec = trainjob["spec"]["trainer"], runtime["spec"]["template"]["spec"]
    (job,) = spec["replicatedJobs"]
    assert job["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job["template"]["spec"].update(parallelism=trainer["numNodes"], completions=trainer["numNodes"])
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node"
    container["command"] = trainer["command"]
    return of_jobset({"metadata": trainjob["metadata"], "spec": spec})


CONTROLLERS = {"job.yaml": of_job_and_service, "jobset.yaml": of_jobset, "trainjob.yaml": of_trainjob}


def pods_of(example: str) -> Pods:
    resources = yaml.safe_load_all((ROOT / "examples" / "kubernetes" / example).read_text())
    return CONTROLLERS[example](*resources)


def name_pods(network: Network, names: list[str]) -> None:
    """As the cluster's DNS does."""
    for machine in network.hosts:
        with (machine.folder / "hosts").open("a") as file:
            file.writelines(f"{other.address} {pod}\n" for pod, other in zip(names, network.hosts, strict=True))


def expanded(text: str, env: dict[str, str]) -> str:
    """As the kubelet does it: a reference to a variable that the container does not have stays as it is."""
    return re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), text)


def start(machine: Machine, folder: Path, command: list[str], index: int, **env: str) -> subprocess.Popen[str]:
    """A pod's container, in a folder that holds the example's `workingDir`."""
    env["JOB_COMPLETION_INDEX"] = str(index)  # set by the Job controller
    command = [expanded(part, env) for part in command]
    return subprocess.Popen(
        # In a container the first process is the command's.
        machine.enter(["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command], folder),
        env={
            **os.environ,
            **env,
            "PATH": f"{Path(forkserver.dadt()).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(machine.home),
            "CUDA_VISIBLE_DEVICES": "-1",
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("example", CONTROLLERS)
def test_its_pods_meet_and_train(hosts: Callable[[int], Network], tmp_path: Path, example: str) -> None:
    pods = pods_of(example)
    assert len(pods.names) == 2
    network = hosts(2)
    name_pods(network, pods.names)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = list(pods.container["command"])
    command[command.index("--epochs") + 1] = "1"

    second, first = (start(network[index], tmp_path, command, index, **{pods.secret: SECRET}) for index in (1, 0))
    (out, _), (said, _) = first.communicate(timeout=PATIENCE), second.communicate(timeout=PATIENCE)
    assert (first.returncode, second.returncode) == (0, 0), out + said
    assert "dadt: 2 workers on 2 hosts" in out
    assert "[1 node1] epoch 1 " in out
    assert f"at {pods.names[0]}:29400" in said


def said_on_the_page(line: str) -> bool:
    line = re.sub(r"\bpid \d+", "pid 2", line.removeprefix("dadt: "))
    return f"`{re.sub(r' [0-9]+ s', ' 600 s', line)}`" in (ROOT / "docs" / "kubernetes.md").read_text()


@pytest.mark.slow
def test_a_pod_that_never_comes_is_told(hosts: Callable[[int], Network], tmp_path: Path) -> None:
    pods, network = pods_of("job.yaml"), hosts(2)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = list(pods.container["command"])
    command[command.index("--start-timeout") + 1] = "5"
    second = start(network[1], tmp_path, command, 1, **{pods.secret: SECRET})
    said, _ = second.communicate(timeout=PATIENCE)
    name_pods(network, pods.names)
    first = start(network[0], tmp_path, command, 0, **{pods.secret: SECRET})
    out, _ = first.communicate(timeout=PATIENCE)
    assert (first.returncode, second.returncode) == (124, 124)
    assert all(map(said_on_the_page, [*said.splitlines(), *out.splitlines()[1:]])), out + said


@pytest.mark.sample(1)
@pytest.mark.parametrize(("lost", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGTERM)])
def test_a_pod_that_is_killed_ends_the_others(
    hosts: Callable[[int], Network], tmp_path: Path, lost: int, number: signal.Signals
) -> None:
    pods, network = pods_of("job.yaml"), hosts(2)
    name_pods(network, pods.names)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "mnist.py").write_text(SLEEP)
    both = [start(network[i], tmp_path, pods.container["command"], i, **{pods.secret: SECRET}) for i in (0, 1)]
    await_that(lambda: (tmp_path / "up0").exists() and (tmp_path / "up1").exists(), "the workers")
    # The kubelet ends a pod by a signal to its first process, and the kernel for lack of memory by SIGKILL to all.
    (around,) = [each for each in psutil.Process(both[lost].pid).children(recursive=True) if each.name() == "unshare"]
    around.children()[0].send_signal(number)
    out, _ = both[1 - lost].communicate(timeout=PATIENCE)
    assert both[1 - lost].returncode == 3, out
    assert said_on_the_page(out.splitlines()[-1]), out
    both[lost].communicate(timeout=PATIENCE)
    for folder in network[lost].path(FOLDERS).iterdir():  # a container's files go with it
        shutil.rmtree(folder)
