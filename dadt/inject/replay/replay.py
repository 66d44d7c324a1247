"""Rebuilds a script's Python state: the script runs again from its beginning up to a snapshot, without its expensive
parts.

Loops run as before, loaders draw the same indices, schedulers and scalers are stepped, and values that the script reads
from tensors are those recorded in the first run. Root modules return the result of their first call again and again, no
weights are updated, one batch replaces all batches, and nothing is exchanged or written. At the snapshot's step, the
state of the snapshot is loaded.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from dadt.comm.shards import gather_anew, local
from dadt.errors import DadtError, NotResumed, PeerLost
from dadt.inject.data.seed import State, Streams
from dadt.inject.replay import variables
from dadt.inject.replay.content import alike, fits
from dadt.inject.replay.held import HeldOutput
from dadt.inject.replay.left import left_by, put
from dadt.inject.replay.newcomer import Newcomer
from dadt.inject.replay.own import Own
from dadt.inject.replay.recorder import digest
from dadt.inject.replay.roster import Roster
from dadt.inject.replay.snapshot import StoredSnapshot
from dadt.inject.replay.values import ReadValues
from dadt.train.optimizer_state import sharded
from dadt.train.runtime import Runtime

NEWS_SECONDS = 2.0
"""Seconds that a rank waits, after the loss of a rank, for the report of which ranks continue to train."""


Goal = StoredSnapshot | Newcomer
"""The point up to which a replay runs the script: a snapshot, or the current step of other ranks."""


class Replay:
    """The replay in a process that resumes. `under_way` is True until the state at the goal is loaded."""

    def __init__(self, runtime: Runtime, roster: Roster, values: ReadValues, streams: Streams, goal: Goal) -> None:
        self._runtime, self._roster, self._values, self._streams = runtime, roster, values, streams
        self._ranks = runtime.ranks
        self.goal = goal
        runtime.replay.goal_step = goal.step
        values.replaying = True
        self.under_way = True
        self._begun = perf_counter()
        self._inside = False
        self._outputs: weakref.WeakKeyDictionary[nn.Module, dict[Any, Any]] = weakref.WeakKeyDictionary()
        self._zeros = WeakTensorKeyDictionary()
        self.held = HeldOutput(goal.log)
        """Hides the script's standard output and error during the replay."""
        self._expected = goal.digest
        self.at_its_end: list[Callable[[], None]] = []
        self.when_abandoned: Callable[[], None] = lambda: None
        self._agreed = False
        self._seconds: float | None = None
        """Seconds that the replay took, until they are reported to the user; else None."""

    # Replacements of expensive steps, forwards and batches ---------------------------------------------------

    def forward(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._inside:
            return call(*args, **kwargs)
        if not self._agreed and self._agree(b""):
            self._abandon("the script goes on by itself on another rank")
            return module(*args, **kwargs)
        if torch.is_grad_enabled():
            self._runtime.begin()
        known = self._outputs.setdefault(module, {})
        key = module.training, torch.is_grad_enabled(), _shape(args, kwargs)
        if key not in known:
            self._inside = True
            try:
                result, left = left_by(module, lambda: _gathered_for(module, lambda: call(*args, **kwargs)))
            finally:
                self._inside = False
            known[key] = _detached(result), [(weakref.ref(part), name, _detached(value)) for part, name, value in left]
        result, beside = known[key]
        for reference, name, value in beside:
            if (part := reference()) is not None:
                put(part, name, _leaves_of(value))
        return _leaves_of(result)

    def backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `backward` wrapped so that, in a replay, parameters without a gradient get zeros, since scripts may
        read gradients."""

        def backward(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self.under_way:
                for p in self._parameters():
                    if p.requires_grad and p.grad is None:
                        p.grad = self._zero(p)
            return result

        return backward

    def grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.under_way:
                return original(outputs, inputs, *args, **kwargs)
            given = original(outputs, inputs, *args, **{**kwargs, "allow_unused": True})
            wanted = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
            return tuple(torch.zeros_like(i) if g is None else g for g, i in zip(given, wanted, strict=True))

        return grad

    def sleep(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def sleep(seconds: Any, /) -> None:
            if not self.under_way or self._values.is_elsewhere(sys._getframe(1)):
                original(seconds)

        return sleep

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Pre-hook of optimizers' steps: delete the gradients in a replay, so that the step changes no weights."""
        if self.under_way:
            self._runtime.batches.trained_before(optimizer)
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None

    # Returning to real training -----------------------------------------------------------------------------

    def loads(self, path: str) -> None:
        """Called when the script reads a file before it trains. If the file was written after training began, it is a
        checkpoint of the script's own, from which the script resumes by itself. The replay is then refused or
        abandoned."""
        if not self.under_way or self._agreed or changed(path) < self.goal.began:
            return
        why = f"the script reads {path}, which was written since it began to train"
        if self._ranks.world.joins:
            refuse(NotResumed(f"{why}, and would go on from there beside the others"))
        if not self._ranks.world.restarts:
            refuse(NotResumed(f"leave out --resume: {why}, and goes on from there by itself"))
        self._abandon(f"{why}, and goes on from there")
        self._runtime.events.on_place.append(self._tell_own)

    def _tell_own(self) -> None:
        if not self._agreed:
            self._agree(b"own")

    def _agree(self, mine: bytes) -> bool:
        """Return whether the script of any rank resumes from a checkpoint of its own. If so, no rank may replay its
        steps, because all ranks have to do the same. Waits for the answers of all ranks."""
        self._agreed = True
        self._values.unknown = 0  # before the first forward nothing is skipped, so values are real
        return not self._ranks.world.joins and any(self._exchange("replay", mine))

    def _exchange(self, what: str, mine: bytes) -> Sequence[bytes]:
        """Exchange `mine` with all ranks, under the name `what`. Returns the bytes of every rank, after all have called
        this."""
        assert self._ranks.control is not None
        self._runtime.reports.listen()  # reports losses of ranks, after which the remaining ranks repeat this exchange
        number = self._ranks.deaths.await_newer(0, 0.0)
        while True:
            try:
                return self._ranks.control.exchange(what, mine, self._ranks.config.start_timeout, number)
            except PeerLost:
                before, number = number, self._ranks.deaths.await_newer(number, NEWS_SECONDS)
                if number == before:
                    raise

    def _abandon(self, why: str) -> None:
        self._values.recorded.clear()
        self._expected = ""
        self._goes_on()
        self.when_abandoned()
        self._ranks.say(f"{why}: no snapshots are used, nor taken")

    def _goes_on(self) -> None:
        """End the replay, so that later forwards, steps and output are real."""
        self.under_way = self._runtime.replay.under_way = self._values.replaying = False
        self._outputs.clear()
        self._zeros.clear()
        for callback in self.at_its_end:
            callback()
        self.held.release()

    # End of the replay --------------------------------------------------------------------------------------

    def stepped(self) -> None:
        while self.under_way and self._ranks.step >= self.goal.step:
            with self._values.aside():
                if not self.goal.further():
                    self._finish()
                    if self._ranks.world.joins:
                        self._runtime.claim()  # other ranks count batches from this point
                self._runtime.replay.goal_step = self.goal.step

    def saw(self, given: Any) -> None:
        """Called at each training forward. Raises NotResumed if the first batch after the replay is not the expected
        one."""
        expected, self._expected = self._expected, ""
        if expected and not self.under_way and digest(given) != expected:
            raise NotResumed(
                "the script comes to another batch than it has trained on before: it draws it, or keeps it from step to"
                " step, in a way that cannot be replayed. Resume from a checkpoint of its own"
            )
        self._announce()

    def ended(self) -> None:
        """Called when the script ends: end the process with an error if the replay has not reached the snapshot."""
        if self.under_way and not isinstance(getattr(sys, "last_value", None), BaseException):
            error = NotResumed(
                f"the script has ended after {self._ranks.step} steps of {self.goal.step} that the snapshot"
                " holds: run the same script with the same arguments, or resume from a checkpoint of its own"
            )
            refuse(error)

    def _finish(self) -> None:
        """Load the state of the snapshot, and end the replay. Raises NotResumed if the state does not fit."""
        if self._values.given != len(self._values.recorded):
            raise NotResumed("the script has read fewer values from tensors than before")
        own, common = self.goal.state(dict(self._roster.tensors()))
        self._check(common)
        try:
            self._put_in_place(own, common)
        except DadtError:
            raise
        except Exception as error:  # loading a state into an object of any class may raise any error
            what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise NotResumed(f"the state of the snapshot cannot be put in place ({what})") from error
        self._goes_on()
        self._seconds = perf_counter() - self._begun

    def _put_in_place(self, own: dict[str, Any], common: dict[str, Any]) -> None:
        tensors = dict(self._roster.tensors())
        mine = dict(variables.held(sys._getframe(), tensors.values(), self._roster.attributes()))
        with torch.no_grad():
            for name, value in common["tensors"].items():
                if name in tensors and tensors[name] is not value:
                    local(tensors[name]).data.copy_(value)
            for name, value in own["variables"].items():
                if name in mine and local(mine[name]).shape == value.shape:
                    local(mine[name]).data.copy_(value)
        self._roster.restore(own.get("counts", {}))
        for optimizer, state in _pairs(self._optimizers, common["optimizers"]):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None
            optimizer.load_state_dict(sharded(optimizer, state))
        if self.goal.is_exact:
            Own(self._runtime, self._roster).put_in_place(own)
        for scheduler, state in _pairs(self._roster.schedulers(), common["schedulers"]):
            scheduler.load_state_dict(state)
        for scaler, state in _pairs(self._roster.scalers(), common["scalers"]):
            scaler.load_state_dict(state)
        random = {name: State.from_plain(state) for name, state in own["random"].items()}
        if "own" not in random:
            self._streams.part_anew(random["shared"])
        else:
            random["own"].restore()
            if "shared" in random:
                self._streams.place(random["shared"])

    def _announce(self) -> None:
        """Report to the user that training continues, once every rank has reached the same batch as before."""
        seconds, self._seconds = self._seconds, None
        if seconds is None:
            return
        if not self._ranks.world.joins:
            self._exchange("resumed", b"")
        self._ranks.say(f"resumed: {self._ranks.step:,} steps replayed in {seconds:.1f} s, training goes on from there")
        if self._values.unknown:
            self._ranks.say(
                "the replay has read whole arrays from tensors: what the script makes of those may not be as it was",
                "warning",
            )

    def _check(self, common: dict[str, Any]) -> None:
        """Raise NotResumed if the script has built other modules, optimizers or schedulers than those in the
        snapshot."""
        gc.collect()  # one of the two runs may not have freed its garbage yet
        mine = {name: tuple(local(t).shape) for name, t in self._roster.tensors()}
        theirs = {name: tuple(t.shape) for name, t in common["tensors"].items()}
        gone = {name for name in theirs if name not in mine and self._roster.was_built(name)}
        trained = set(map(id, self._parameters()))
        needed = {name for name, t in self._roster.tensors() if id(t) in trained}
        differs = any(mine.get(name) != shape for name, shape in theirs.items() if name not in gone)
        if differs or not needed <= theirs.keys():
            raise NotResumed("the script has built other modules than before")
        there = (self._optimizers, self._roster.schedulers(), self._roster.scalers())
        for each, name in zip(there, ("optimizers", "schedulers", "scalers"), strict=True):
            if not common[name].keys() >= each.keys():
                raise NotResumed("the script has built other optimizers or schedulers than before")
            for built, state in _pairs(each, common[name]) if name != "optimizers" else ():
                if not alike(built.state_dict(), state):
                    raise NotResumed(f"the state of {type(built).__name__} in the snapshot is that of another object")
        for optimizer, state in _pairs(self._optimizers, common["optimizers"]):
            if not fits(optimizer, state):
                raise NotResumed(f"the state of {type(optimizer).__name__} in the snapshot is that of other parameters")
            rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
            if rates != (before := [float(group.get("lr", 0.0)) for group in state["param_groups"]]):
                raise NotResumed(f"{type(optimizer).__name__} has a learning rate of {rates}, and had {before}")

    @property
    def _optimizers(self) -> dict[int, torch.optim.Optimizer]:
        return {self._runtime.optimizers.number(optimizer): optimizer for optimizer in self._runtime.optimizers}

    def _parameters(self) -> Iterator[torch.Tensor]:
        for optimizer in self._runtime.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _zero(self, p: torch.Tensor) -> torch.Tensor:
        if p not in self._zeros:
            self._zeros[p] = torch.zeros_like(p)
        zero: torch.Tensor = self._zeros[p]
        return zero


def _gathered_for(module: nn.Module, call: Callable[[], Any]) -> Any:
    """Call a forward that no backward follows, and let FSDP free the weights that it has gathered for it."""
    result = call()
    gather_anew(module.modules())
    return result


def _pairs(objects: Mapping[int, Any], states: Mapping[int, Any]) -> list[tuple[Any, Any]]:
    """Return the objects that have a state in the snapshot, each with its state, in the order in which they were
    built."""
    return [(objects[number], states[number]) for number in sorted(objects.keys() & states.keys())]


def refuse(error: NotResumed) -> NoReturn:
    """Print the error and end this process, where raising it would not do so: while torch is imported, and after the
    script's end."""
    sys.excepthook(NotResumed, error, None)
    os._exit(error.exit_code)


def changed(path: str, stat: Callable[[str], os.stat_result] = os.stat) -> float:
    """Return the time at which a file was last written (seconds since the epoch). stat: the original os.stat, which
    DADT replaces later."""
    return stat(path).st_mtime


def _shape(args: Any, kwargs: Any) -> Any:
    """Return a key of a call's arguments, by which calls whose results have the same shapes are recognised."""
    leaves, spec = tree_flatten((args, kwargs))
    kinds = tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else _plain(leaf)
        for leaf in leaves
    )
    return kinds, str(spec)


def _plain(leaf: Any) -> Any:
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf)


def _detached(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: (t.detach(), t.requires_grad), value)


def _leaves_of(known: Any) -> Any:
    """Return copies of recorded results. They are not leaf tensors, so that scripts may change them in place."""

    def fresh(pair: tuple[torch.Tensor, bool]) -> torch.Tensor:
        return pair[0].detach().requires_grad_(pair[1]).clone()

    leaves, spec = tree_flatten(known, is_leaf=_is_pair)
    return tree_unflatten([fresh(each) if _is_pair(each) else each for each in leaves], spec)


def _is_pair(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and isinstance(value[0], torch.Tensor) and type(value[1]) is bool
