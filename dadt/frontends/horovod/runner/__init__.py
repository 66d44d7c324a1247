"""Horovod's `run`, which starts workers from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    np: int | None = None,
    hosts: str | None = None,
    **settings: Any,
) -> list[Any]:
    """Call the function on `num_proc` workers and return the results by rank.

    np: the former name of num_proc; one worker by default. hosts: "host1:2,host2:2"; by default this host. settings:
    settings of `dadt.run`.
    """
    from dadt.api.run import run

    return run(func, args, kwargs, np=num_proc or np or 1, hosts=hosts or "", **settings)
