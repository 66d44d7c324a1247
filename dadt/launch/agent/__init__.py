"""The one process per host that owns its workers, and the shim under mpirun."""
