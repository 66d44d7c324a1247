"""Start and end of a script's work with other ranks, who is who, and sets of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dadt.api.session import Session
from dadt.comm.collectives.process_set import ProcessSet
from dadt.errors import ConfigError, DadtError

_session: Session | None = None
_ended = False


# Start and end --------------------------------------------------------------------------------------------------------


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
    """Become one of the job's ranks: under `dadt run`, torchrun, mpirun or srun, or alone under plain python.

    From here on nothing but the optimizers given to `DistributedOptimizer` is DADT's business: data, seeds, files and
    other optimizers are the script's. All ranks call it, at the top of the script and with the same arguments; a second
    call does nothing.

    Random numbers: under `dadt run` the generators of torch, numpy and random begin alike on all ranks, so that splits
    and weights agree. When training begins (the first training forward of a model whose optimizer is wrapped, or the
    first step of any optimizer of torch), each rank goes on with numbers of its own, derived from those. A generator
    that the script has seeded after `init` stays as it is. `--no-seeding` leaves all of them to the script.

    cycle_duration_ms: longest time in milliseconds that a ready tensor waits for others to be fused with.
    executor, broadcast_executor, all_reduce_executor: what moves the bytes, as of `--executor`.
    all_reduce_buffer_size, group_buffer_size: bytes up to which tensors are fused; 0: none are.
    timeline_path: file for a trace of who waited for what.
    knobs: any other setting of a worker by its name in docs/configuration.md, as algorithm="sync" or timeout=60.

    Each stands above the flag or variable of the same setting. Raises ConfigError for a wrong value, or one that
    differs between ranks; StartTimeout naming the ranks that do not come; DadtError after `shutdown`, and where
    training has begun.
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
    """Whether this process is between `init` and `shutdown`; a forked child never is."""
    return _session is not None and not _session.forked


def shutdown() -> None:
    """Wait for what is pending and leave the job. All ranks call it, or end without it, which does the same.

    Does nothing before `init`, when called again, and in a forked child. Raises CommTimeout if something is still
    pending after `--timeout`.
    """
    global _session, _ended
    if _session is not None and not _session.forked:
        session, _session, _ended = _session, None, True
        session.close(session.config.timeout)


def session() -> Session:
    """What `init` has made. Raises DadtError before it."""
    if _session is None:
        when = "after dadt.shutdown()" if _ended else "before dadt.init(): call it at the top of the script"
        raise DadtError(f"a function of dadt was called {when}")
    _session.check_process()
    return _session


# Who is who -----------------------------------------------------------------------------------------------------------


def rank() -> int:
    """This process's number among all, from 0. Raises DadtError before `init`, as all that follows."""
    return session().world.rank


def size() -> int:
    """How many ranks there are."""
    return session().world.world_size


def local_rank() -> int:
    """This process's number among those of its host, from 0."""
    return session().world.local_rank


def local_size() -> int:
    """How many ranks this host has."""
    return session().world.local_size


def cross_rank() -> int:
    """This host's number among the hosts, from 0."""
    return session().world.cross_rank


def cross_size() -> int:
    """How many hosts there are."""
    return session().cross_size


def add_process_set(ranks: Sequence[int]) -> ProcessSet:
    """A set of ranks that exchange with each other alone, over a connection of their own: give it as `process_set=`.

    All ranks of the job call this, with the same ranks, also those that are not in it. Raises ValueError where ranks do
    not exist, come twice, or differ between callers.
    """
    return session().add(ranks)


def remove_process_set(process_set: ProcessSet) -> None:
    """Close the set's connection. Its ranks call this when they have finished with it."""
    session().remove(process_set)


def among_of(process_set: ProcessSet | None) -> ProcessSet:
    among = session().all if process_set is None else process_set
    _ = among.named  # this rank is one of them
    return among


def root_of(root: int, root_rank: int | None) -> int:
    """Whichever of DADT's and Horovod's spelling is used."""
    return root if root_rank is None else root_rank
