"""State that DADT adds to a checkpoint besides the script's own, so that a resumed training continues bit for bit.

It is stored in the optimizer's state dict, under a key that torch's load_state_dict ignores, as plain numbers and
tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from dadt.comm.shards import local
from dadt.errors import CommError, DadtError, NotResumed
from dadt.train import observation
from dadt.train.attachment import Attachment
from dadt.train.attachments import Attachments
from dadt.train.optimizers import Optimizers
from dadt.train.ranks import Ranks
from dadt.train.restored import by_index, by_parameter, numbers_of, places_of

KEY = "dadt"
"""Key of DADT's state in the dict that optimizer.state_dict() returns."""
VERSION = 2
_MANY = 5
"""Number of consecutive steps in which the script reads the optimizer's state, after which a warning is printed."""


class Randomness(Protocol):
    """Interface of the random streams, as checkpoints and steps use them."""

    seeded_anew: set[str]

    def shared(self, *, only_torch: bool = False) -> AbstractContextManager[None]: ...
    def apart(self, *, only_torch: bool = False) -> AbstractContextManager[None]: ...
    def state(self) -> dict[str, Any]: ...
    def loaded(self) -> None: ...
    def load_state(self, shared: dict[str, Any], own: dict[str, Any] | None, seeded_anew: Iterable[str]) -> None: ...


class Checkpoints:
    """Saves and loads DADT's part of the state of all optimizers of one rank.

    Saving needs no action of other ranks, because an exchange in flight is one that all ranks have launched, or will
    launch in any case. State of one rank alone (BatchNorm statistics, compression errors still to be sent) is not
    saved: at the save, each rank replaces it by what all ranks have in common, so that training continues from exactly
    what was saved. This is exact if all ranks read the optimizer's state after the same step, as scripts without
    distributed code do. A script with distributed code may save on rank 0 alone. Nothing is replaced then, and resumed
    training is equal except for rounding.
    """

    def __init__(self, ranks: Ranks, optimizers: Optimizers, attachments: Attachments) -> None:
        self._ranks, self._optimizers, self._attachments = ranks, optimizers, attachments
        self.streams: Randomness | None = None
        self._loaded: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[str, Any]] = weakref.WeakKeyDictionary()
        """State that the script has loaded into each optimizer, until training continues from it."""
        self._saves: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        """For each optimizer: the step of its last save, and the number of consecutive steps with a save."""
        self.any_loaded = False
        """Whether the script has loaded state into any optimizer."""
        self._own: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[str, Any]] = weakref.WeakKeyDictionary()
        """For each optimizer, this rank's own state from a snapshot of the same step as the state in `_loaded`."""
        self.on_resumed: list[Callable[[], None]] = []
        """Callbacks that run once when training continues from loaded state."""
        self._aside = False
        self._by_all = False

    @contextmanager
    def by_all(self) -> Iterator[None]:
        """Context in which all ranks save together, also in a script with distributed code of its own."""
        self._by_all = True
        try:
            yield
        finally:
            self._by_all = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context in which DADT itself reads or sets optimizer states, so that DADT's own part of the state is neither
        saved nor loaded."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    @torch.inference_mode(False)
    def save(self, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Return the part that DADT adds to the optimizer's state dict, or None if it adds nothing. Waits for the
        exchange in flight; raises CommError."""
        if self._aside or self._ranks.alone or optimizer in self._optimizers.left_alone:
            return None
        if optimizer in self._loaded:
            return self._loaded[optimizer]
        a = self._attachments.of(optimizer)
        if a is None:
            return None
        self._count(a)
        a.prediction.undo()
        state = self._state_of(a)
        if state is not None and a.algorithm.identical and (self._by_all or not self._optimizers.script.is_distributed):
            self._join(a, state)
            a.schema.forget_residuals()
        indices = numbers_of(a.optimizer)
        prediction = {key: by_index(value, indices) for key, value in a.prediction.state().items()}
        random = self.streams.state() if self.streams is not None else {}
        return {**self.common(a, state or {}, prediction), "random": random}

    def common(self, a: Attachment, state: dict[str, Any], prediction: dict[str, Any]) -> dict[str, Any]:
        """Return the part of the saved state that is equal on all ranks. state: the algorithm's state. prediction: the
        prediction's content."""
        return {
            "version": VERSION,
            "algorithm": self._ranks.config.algorithm,
            "world_size": self._ranks.world.world_size,
            "rank": self._ranks.world.rank,
            "step": a.step,
            "state": state,
            "prediction": prediction,
            "momentum": a.momentum.state(),
            "weighing": a.weighing.state(),
            "random": {},
        }

    def _state_of(self, a: Attachment) -> dict[str, Any] | None:
        """Return the algorithm's state with the gradients in flight, or None if the gradients were lost because a rank
        was lost or an exchange has failed."""
        ranks = self._ranks
        while True:
            failed = ranks.engine.error is not None
            if not (failed and not ranks.survives):
                try:
                    return observation.state_of(a)
                except CommError as error:
                    if ranks.survives and any(each.consumed for each in self._attachments):
                        # Other ranks may lack the averages that this rank is about to apply, and sending them is
                        # impossible in the middle of a save.
                        ranks.say("saved as ranks were lost: without the gradients in flight", level="warning")
                        return None
                    try:
                        if not ranks.requests.interruption.apart:
                            self._ranks.regroup(error)  # reconnects if ranks were lost, else raises the error
                            continue
                    except CommError:
                        if not failed:
                            raise
            # After a failure no exchange can complete, but the script may still save a last checkpoint.
            ranks.say("saved after a failure: without the gradients in flight", level="warning")
            return None

    def _count(self, a: Attachment) -> None:
        """Warn if the script reads the optimizer's state in every step, for example to log a learning rate."""
        last, row = self._saves.get(a.optimizer, (-1, 0))
        row = row + (a.step > last) if a.step <= last + 1 else 1
        self._saves[a.optimizer] = a.step, row
        if row == _MANY and a.algorithm.identical:
            self._ranks.say(
                f"optimizer.state_dict(){a.name} is called in every step: each call waits for the exchange under way,"
                " and drops what --compression keeps, as in a checkpoint. Read optimizer.param_groups in its place",
                level="warning",
            )

    def load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Store DADT's part of a state dict that the script has loaded. It takes effect at the next training forward or
        use of gradients."""
        if self._aside or self._ranks.alone:
            return
        self.any_loaded = True
        part = state_dict.get(KEY)
        self._loaded.pop(optimizer, None)
        if part is None:
            return
        if not isinstance(part, dict) or part.get("version") != VERSION:
            self._ranks.say("the checkpoint was written by another version of DADT: training begins with a warm-up")
            return
        self._loaded[optimizer] = part
        if self.streams is not None:
            self.streams.loaded()

    def keep(self, optimizer: torch.optim.Optimizer, part: dict[str, Any]) -> None:
        """Store a saved state, from which training continues once the optimizer is attached to DADT again."""
        self._loaded[optimizer] = part

    def keep_own(self, optimizer: torch.optim.Optimizer, own: dict[str, Any]) -> None:
        """Store this rank's own state from a snapshot, which is loaded together with the state that all ranks share."""
        self._own[optimizer] = own

    def spread(self, a: Attachment) -> None:
        """Send the state that the first rank has loaded to all ranks, which continue from it. All ranks call it when
        the optimizer is attached."""
        mine = self._loaded.get(a.optimizer)
        seeded_anew = sorted(self.streams.seeded_anew) if self.streams is not None else []
        # All ranks build a tuple, because the null executor sends nothing and returns each rank's own value, which must
        # have the same form.
        told = (mine if self._ranks.group.rank == 0 else None, seeded_anew)
        part, seeded_anew = self._ranks.collect(f"checkpoint{a.name}", told)[0]
        self._loaded.pop(a.optimizer, None)
        if part is not None:
            self._loaded[a.optimizer] = part
            self._load_streams(part, mine or part, seeded_anew)

    def resume(self) -> None:
        """Restore the state that the script has loaded into each optimizer, if any. Called when training continues."""
        for a in self._attachments if self._loaded else ():
            if a.alive and (part := self._loaded.pop(a.optimizer, None)) is not None:
                self._resume(a, part, self._own.pop(a.optimizer, None))
        callbacks, self.on_resumed = self.on_resumed, []
        for callback in callbacks:
            callback()

    def _resume(self, a: Attachment, part: dict[str, Any], own: dict[str, Any] | None) -> None:
        config, size = self._ranks.config, self._ranks.world.world_size
        if part["algorithm"] != config.algorithm:
            self._ranks.say(
                f"the checkpoint is one of --algorithm {part['algorithm']}: --algorithm {config.algorithm} goes on from"
                " its weights and optimizer state, with a warm-up of its own"
            )
            return
        if part["world_size"] != size:
            self._ranks.say(
                f"the checkpoint is one of {part['world_size']} ranks: {size} go on from it at step {part['step']}"
            )
        parameters = list(numbers_of(a.optimizer))
        prediction = {key: by_parameter(value, parameters) for key, value in part["prediction"].items()}
        of_tensors = [value for value in prediction.values() if isinstance(value, dict)]
        of_tensors.append(by_parameter(a.algorithm.by_parameter(part["state"]), parameters))
        if any(local(t).shape != local(p).shape for value in of_tensors for p, t in value.items()):
            self._ranks.say("the checkpoint is one of another model: training begins with a warm-up")
            return
        a.step = part["step"]
        a.numbered_from = a.step - a.exchanges
        a.momentum.load_state(part.get("momentum", {}))
        a.refresh()
        a.weighing.load_state(part.get("weighing", {}))
        if own is not None:
            try:
                observation.restore(a, own, prediction, part["state"])
            except DadtError:
                raise
            except Exception as error:  # the values come from a file and may be of any kind
                what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                raise NotResumed(f"the state of this rank's training cannot be put in place ({what})") from error
            return
        a.prediction.load_state(prediction)
        if part["state"]:
            a.algorithm.load_state(part["state"])
        if a.algorithm.identical:
            self._join(a, part["state"])
            a.schema.forget_residuals()

    def _load_streams(self, part: dict[str, Any], mine: dict[str, Any], seeded_anew: Iterable[str]) -> None:
        """Restore the random streams. part: state with the streams that all ranks share; mine: state that this rank has
        loaded, perhaps from its own file."""
        if self.streams is not None and part["random"]:
            own = mine["random"]["own"] if mine["random"] and mine["rank"] == self._ranks.world.rank else None
            self.streams.load_state(part["random"]["shared"], own, seeded_anew)

    def _join(self, a: Attachment, state: dict[str, Any]) -> None:
        """Replace state that only this rank has by values that are equal on all ranks: buffers by their newest average,
        and the prediction's expected gradients by the averages in flight."""
        buffers = self._optimizers.buffers
        flights = state.get("in_flight", ())
        flight = flights[-1] if flights else {"gradients": {}, "scale": None}
        averages = a.momentum.unseen.held(by_parameter(flight["gradients"], list(numbers_of(a.optimizer))))
        a.momentum.join(averages, flight["scale"])
        if flights:
            places = places_of(a)
            for i, value in flights[-1]["buffers"].items():
                if i < len(places):
                    module, name = places[i]
                    buffers.join(module, name, value)
            a.prediction.join(averages, flight["scale"])
        else:
            buffers.join_official(a.modules)
