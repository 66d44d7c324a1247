"""Functions with which a script joins and leaves the job, queries its rank numbers, and makes process sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dadt.api.session import Session
from dadt.comm.collectives.process_set import ProcessSet
from dadt.errors import ConfigError, DadtError

_session: Session | None = None
_ended = False


# Start and end of a session -------------------------------------------------------------------------------------------


def init(
    *,
    cycle_duration_ms: float | None = None,
    executor: str | None = None,
    broadcast_executor: str | None = None,
    all_reduce_executor: str | None = None,
    all_reduce_buffer_size: int | None = None,
    group_buffer_size: int | None = None,
    timeline_path: str | None = None,
    **knobs: Any,
) -> None:
    """Join the job as one of its ranks: under `dadt run`, torchrun, mpirun or srun, or alone under plain python.

    From then on DADT handles only the optimizers given to `DistributedOptimizer`; data, seeds, files and other
    optimizers are up to the script. All ranks call this at the top of the script with the same arguments; a second call
    does nothing.

    Random numbers: under `dadt run` the generators of torch, numpy and random start with equal seeds on all ranks, so
    that splits and weights agree. When training begins (the first training forward of a model whose optimizer is
    wrapped, or the first step of any torch optimizer), each rank continues with its own stream, derived from the common
    one. A generator that the script has seeded after `init` stays as it is. `--no-seeding` leaves all seeding to the
    script.

    cycle_duration_ms: longest time in milliseconds that a ready tensor waits to be fused with others.
    executor, broadcast_executor, all_reduce_executor: executors to use, as for `--executor`.
    all_reduce_buffer_size, group_buffer_size: size in bytes up to which tensors are fused; 0 fuses none.
    timeline_path: file for a trace of who waited for what.
    knobs: any other worker setting by its name in docs/configuration.md, such as algorithm="sync" or timeout=60.

    An argument overrides the flag and the variable of the same setting. Raises ConfigError for a value that is wrong or
    differs between ranks; StartTimeout, which names the missing ranks; and DadtError after `shutdown` or once training
    has begun.
    """
    global _session
    given = {
        "cycle_duration_ms": cycle_duration_ms,
        "executor": executor,
        "broadcast_executor": broadcast_executor,
        "all_reduce_executor": all_reduce_executor,
        "all_reduce_buffer_size": all_reduce_buffer_size,
        "group_buffer_size": group_buffer_size,
        "timeline_path": timeline_path,
        **knobs,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if _ended:
        raise DadtError("dadt.init() after dadt.shutdown(): a process is a rank once only")
    if _session is None:
        _session = Session(given)
    elif given and given != _session.knobs:
        raise ConfigError("dadt.init() was called before, with other arguments: settings are fixed for a job")


def initialized() -> bool:
    """Return whether this process is between `init` and `shutdown`. A forked child never is."""
    return _session is not None and not _session.forked


def shutdown() -> None:
    """Wait for pending operations and leave the job. All ranks call `shutdown`; a process that ends without calling it
    also waits and leaves the job.

    Does nothing before `init`, when called again, and in a forked child. Raises CommTimeout if an operation is still
    pending after `--timeout`.
    """
    global _session, _ended
    if _session is not None and not _session.forked:
        session, _session, _ended = _session, None, True
        session.close(session.config.timeout)


def session() -> Session:
    """Return the session that `init` has created. Raises DadtError before `init`."""
    if _session is None:
        when = "after dadt.shutdown()" if _ended else "before dadt.init(): call it at the top of the script"
        raise DadtError(f"a function of dadt was called {when}")
    _session.check_process()
    return _session


# This rank, and how many ranks there are ------------------------------------------------------------------------------


def rank() -> int:
    """Return the rank of this process, from 0. Raises DadtError before `init`, as do all functions that return such
    numbers."""
    return session().world.rank


def size() -> int:
    """Return the number of ranks."""
    return session().world.world_size


def local_rank() -> int:
    """Return the number of this process among the processes of its host, from 0."""
    return session().world.local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return session().world.local_size


def cross_rank() -> int:
    """Return the number of this host among all hosts, from 0."""
    return session().world.cross_rank


def cross_size() -> int:
    """Return the number of hosts."""
    return session().cross_size


def add_process_set(ranks: Sequence[int]) -> ProcessSet:
    """Make a set of ranks that exchange among themselves, over their own connection. Pass it as `process_set=`.

    All ranks of the job call `add_process_set` with the same ranks, including those outside the set. Raises ValueError
    if ranks do not exist, occur twice, or differ between callers.
    """
    return session().add(ranks)


def remove_process_set(process_set: ProcessSet) -> None:
    """Close the connection of a process set. The ranks of the set call `remove_process_set` when they no longer need
    the connection."""
    session().remove(process_set)


def among_of(process_set: ProcessSet | None) -> ProcessSet:
    among = session().all if process_set is None else process_set
    _ = among.named  # reading `named` raises DadtError if this rank is not in the set
    return among


def root_of(root: int, root_rank: int | None) -> int:
    """Return the root rank from DADT's argument `root` or Horovod's `root_rank`, whichever the caller used."""
    return root if root_rank is None else root_rank
