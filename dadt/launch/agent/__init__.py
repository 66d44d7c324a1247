"""The agent, one process per host that owns the host's workers, and the shim that mpirun starts."""
