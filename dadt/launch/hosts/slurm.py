"""Finds the hosts of a Slurm allocation, and removes from the environment Slurm's variables that would mislead agents
and workers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, MutableMapping

from dadt.errors import ConfigError, LaunchError
from dadt.launch.hosts.host import Host

KEPT = re.compile(r"SLURM_(JOB|ARRAY_|SUBMIT_|CLUSTER_|WORKING_CLUSTER|CONF|RESTART_COUNT|TMPDIR|PROTOCOL)|SLURMD_")
"""Matches the Slurm variables that identify the job, which are kept. All others are removed: they are options of srun
(with an inherited --cpus-per-task, an agent would get the cores of one worker only), or describe a job step, of which a
worker would then regard itself as a task."""
SCONTROL_SECONDS = 30.0


def slurm_hosts(env: Mapping[str, str]) -> list[Host] | None:
    """Return the nodes of the current Slurm allocation; None outside of an allocation. Raises ConfigError."""
    nodes = env.get("SLURM_JOB_NODELIST")
    if "SLURM_JOB_ID" not in env or not nodes:
        return None
    if "SLURM_STEP_ID" in env and env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        remedy = "call it once, without srun; it starts the workers on all nodes by itself"
        raise ConfigError(f"srun has started dadt run {env['SLURM_STEP_NUM_TASKS']} times: {remedy}")
    names = _expand(nodes)
    return [Host(name=name, slots=slots) for name, slots in zip(names, _slots(env, len(names)), strict=True)]


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's notation of numbers per node: "2(x3),1" is 2, 2, 2, 1. Raises ValueError."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ValueError(f"{part!r} is not understood")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def forget_step(env: MutableMapping[str, str]) -> None:
    """Delete all Slurm variables except those that identify the job."""
    for name in [name for name in env if name.startswith(("SLURM_", "SRUN_")) and not KEPT.match(name)]:
        del env[name]


def _expand(nodes: str) -> list[str]:
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=SCONTROL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"scontrol show hostnames {nodes}: {error}; name the hosts by -H") from error
    if done.returncode:
        raise LaunchError(f"scontrol show hostnames {nodes}: {done.stderr.strip()}; name the hosts by -H")
    return done.stdout.split()


def _slots(env: Mapping[str, str], count: int) -> list[int]:
    """Return the slots of each node, which are its tasks if some node has several tasks. Otherwise all are 0, which
    means one slot per GPU: users of launchers that start a process per GPU themselves usually request one task per
    node."""
    text = env.get("SLURM_TASKS_PER_NODE", "")
    if "SLURM_NTASKS" not in env or not text:
        return [0] * count  # if the user did not request a number of tasks, Slurm counts cores as tasks
    try:
        tasks = tasks_per_node(text)
    except ValueError as error:
        raise ConfigError(f"SLURM_TASKS_PER_NODE={text}: {error}; name the hosts and slots by -H") from None
    if len(tasks) != count:
        raise ConfigError(f"SLURM_TASKS_PER_NODE={text} counts {len(tasks)} nodes of {count}; name the hosts by -H")
    return tasks if max(tasks) > 1 else [0] * count
