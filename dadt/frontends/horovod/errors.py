"""The errors that scripts for Horovod catch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dadt.errors import DadtError


class HorovodInternalError(RuntimeError):
    """An operation between ranks failed. The cause is DADT's own error."""


class HostsUpdatedInterrupt(RuntimeError):
    """Horovod's exception for changed hosts. DADT never raises it, since the hosts of a DADT job change only when the
    job starts again."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


@contextmanager
def horovods() -> Iterator[None]:
    """Context manager that raises Horovod's HorovodInternalError in place of DADT's errors."""
    try:
        yield
    except DadtError as error:
        raise HorovodInternalError(str(error)) from error
