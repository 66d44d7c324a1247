"""The agent, which is the one process per host that starts and ends the host's workers, and the shim, which mpirun
starts in place of a worker."""
