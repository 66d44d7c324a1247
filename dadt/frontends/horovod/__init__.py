"""Horovod's API on DADT's core. Under `dadt run`, scripts that import horovod find this where it is not installed.

Names, arguments, errors and their moments are those of Horovod 0.28 (Apache-2.0, https://github.com/horovod/horovod).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__version__ = "0.28.1"
"""Of Horovod's API."""


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    hosts: str | None = None,
    **settings: Any,
) -> list[Any]:
    """Call the function on `np` workers and return the results by rank, as `dadt.run` does.

    hosts: "host1:2,host2:2"; by default this host. settings: those of `dadt.run`.
    """
    from dadt.api.run import run

    return run(func, args, kwargs, np=np, hosts=hosts or "", **settings)
