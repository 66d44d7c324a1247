"""Ranks as other launchers tell them, by variables that were recorded."""

from __future__ import annotations

import pytest

from dadt.world import World

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
INTEL = {**MPICH, "I_MPI_HYDRA_HOST_FILE": "hosts", "I_MPI_INFO_NUMA_NODE_NUM": "2", "PMI_FD": "9"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
}
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
DAEMON = {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
"""Of a process that a daemon of mpirun's started, which srun had started."""


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        (OPEN_MPI, "Open MPI"),
        (MPICH, "MPICH"),
        (INTEL, "MPICH"),
        (TORCHRUN, "torchrun"),
        (STEP, "srun"),
        ({**DAEMON, **OPEN_MPI}, "Open MPI"),
        ({**DAEMON, **MPICH}, "MPICH"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", **TORCHRUN}, "torchrun"),
    ],
)
def test_each_launcher_is_understood(env, launcher):
    assert World.from_launcher(env) == World(launcher=launcher, rank=3, world_size=4, local_rank=1, local_size=2)


@pytest.mark.parametrize("env", [{}, BATCH, {"RANK": "1", "WORLD_SIZE": "2"}, {"PMI_RANK": "1", "PMI_SIZE": "2"}])
def test_nothing_else_makes_a_rank(env):
    assert World.from_launcher(env) == World()


@pytest.mark.parametrize(("node", "size"), [("0", 2), ("2", 2), ("3", 1), ("9", 1)])
def test_tasks_of_a_node(node, size):
    env = {**STEP, "SLURM_NODEID": node, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
    assert World.from_launcher(env).local_size == size
