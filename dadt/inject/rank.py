"""A rank, as the hooks of this package need it. `dadt.train.runtime.Runtime` is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dadt.config import Config
    from dadt.world import World


class Rank(Protocol):
    """A rank's place in the job, and its settings."""

    @property
    def world(self) -> World: ...
    @property
    def config(self) -> Config: ...
    @property
    def alone(self) -> bool: ...
    @property
    def hooked(self) -> bool: ...
