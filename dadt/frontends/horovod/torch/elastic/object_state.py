"""State of a training that goes back to its last commit after an error."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from dadt.frontends.horovod.torch import place
from dadt.frontends.horovod.torch.state import broadcast_object


class State:
    """What a training goes on from. Subclasses have `save`, `restore` and `sync`."""

    def __init__(self, bcast_object: Callable[..., Any] | None = None, get_rank: Callable[[], int] | None = None):
        """bcast_object, get_rank: accepted for scripts written for Horovod, and not used."""
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Accept functions for `on_reset`."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Reset, then call the registered functions."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state in memory."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Hosts do not change while a job runs, so this does nothing."""

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take rank 0's state on all ranks."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called when ranks have changed."""


class ObjectState(State):
    """Attributes that can be pickled: `ObjectState(epoch=0)` has `state.epoch`."""

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = dict(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self) -> None:
        """Keep a copy of the attributes."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Go back to the copy."""
        self._set_attributes()

    def sync(self) -> None:
        """Take rank 0's attributes on all ranks."""
        if self._saved_state:
            now = {name: getattr(self, name) for name in self._saved_state}
            self._saved_state = broadcast_object(now)
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function, whose first argument is a State: it starts from rank 0's.

    In Horovod it is called again when workers are lost or have come. Here a lost worker ends the job, and
    `--max-restarts` starts the job again from the top of the script; rank 0 says so.
    """

    @functools.wraps(function)
    def train(state: State, *args: Any, **kwargs: Any) -> Any:
        if place.rank() == 0 and place.size() > 1:
            sys.stderr.write(
                "dadt: hvd.elastic.run: nothing is elastic here. A lost worker ends the job;"
                " --max-restarts N starts it again, from the checkpoint that the script reads\n"
            )
        state.sync()
        return function(state, *args, **kwargs)

    return train
