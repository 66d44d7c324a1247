"""Makes two functions from one operation: one that waits for the result, and one that returns a handle."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from dadt.comm.collectives.process_set import Handle

P = ParamSpec("P")
T = TypeVar("T")


def blocking(start: Callable[P, Handle[T]]) -> Callable[P, T]:
    """Make a function that calls `start` and waits for the handle that `start` returns. Its signature shows the type of
    the result in place of `Handle`."""

    @functools.wraps(start)
    def wait(*args: P.args, **kwargs: P.kwargs) -> T:
        return start(*args, **kwargs).wait()

    signature = inspect.signature(start)
    result = str(signature.return_annotation).removeprefix("Handle[").removesuffix("]")
    wait.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
    return wait


def started(blocked: Callable[P, T]) -> Callable[P, Handle[T]]:
    """Return the non-blocking form of a function that `blocking` made. The non-blocking function has `_async` in its
    name and returns a handle."""
    start: Callable[P, Handle[T]] = inspect.unwrap(blocked)

    @functools.wraps(start)
    def run(*args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        return start(*args, **kwargs)

    in_place = "_" if start.__name__.endswith("_") else ""
    run.__name__ = run.__qualname__ = f"{start.__name__.removesuffix('_')}_async{in_place}"
    overwrites = ". Waiting for the handle overwrites the tensor" if in_place else " for the result"
    run.__doc__ = f"Like {start.__name__}, but returns a handle{overwrites}."
    return run
