"""Horovod Elastic's state objects, which hold the state of a training run and restore the last commit after an
error."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from dadt.frontends.horovod.torch import place
from dadt.frontends.horovod.torch.state import broadcast_object


class State:
    """Base class of a state from which training can continue. Subclasses implement `save`, `restore` and `sync`."""

    def __init__(self, bcast_object: Callable[..., Any] | None = None, get_rank: Callable[[], int] | None = None):
        """bcast_object, get_rank: accepted for scripts written for Horovod, and not used."""
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Add functions that `on_reset` calls."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset`, and then the functions registered by `register_reset_callbacks`."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state in memory."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Does nothing, since hosts do not change while a job runs."""

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the state from the copy that `save` made."""
        raise NotImplementedError

    def sync(self) -> None:
        """Replace the state on all ranks by rank 0's."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt the state to a changed number of ranks; called by `on_reset`. Does nothing by default."""


class ObjectState(State):
    """A state made of attributes that can be pickled: `ObjectState(epoch=0)` has `state.epoch`."""

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
        """Keep a copy of the attributes in memory, which `restore` reads."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Restore the attributes from the copy that `save` made."""
        self._set_attributes()

    def sync(self) -> None:
        """Set the attributes on all ranks to rank 0's values."""
        if self._saved_state:
            now = {name: getattr(self, name) for name in self._saved_state}
            self._saved_state = broadcast_object(now)
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function whose first argument is a State, so that all ranks take rank 0's state before the
    function is called.

    Horovod calls the function again when workers are lost or added. Here a lost worker ends the job, and
    `--max-restarts` starts the job again from the top of the script; rank 0 prints this.
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
